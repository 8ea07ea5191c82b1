"""The stand-in hub of tests/hf, serving datasets, and processes that load data from it."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from hf import hub

HERE = Path(__file__).parent


class DatasetHub(hub.Hub):
    """Serves ``root/<org>/<name>/...`` as dataset repositories; models are unknown to it."""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        class Handler(super().handler()):  # type: ignore[misc]
            def do_GET(self) -> None:
                if self.path.startswith(("/api/datasets/", "/datasets/")):
                    self.path = self.path.replace("/api/datasets/", "/api/models/", 1)
                    self.path = self.path.removeprefix("/datasets")
                    super().do_GET()
                else:
                    self.miss("RepoNotFound")

            do_HEAD = do_GET

        return Handler


class Process(hub.Process):
    """A Python process with its own cache, to which calls of ``dataset_calls`` are sent."""

    program = (str(HERE / "dataset_calls.py"),)
    path = (str(HERE.parents[1] / "examples"), *filter(None, sys.path))
