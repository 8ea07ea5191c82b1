"""The stand-in hub of tests/hf, serving datasets, and processes that load data from it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hf import hub

HERE = Path(__file__).parent


class DatasetHub(hub.Hub):
    """Serves ``root/<org>/<name>/...`` as dataset repositories; models are unknown to it."""

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


def _handler(served: DatasetHub) -> type[BaseHTTPRequestHandler]:
    models = hub._handler(served)

    class Handler(models):  # type: ignore[valid-type, misc]
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

    def __init__(self, served: DatasetHub, home: Path, **environment: str) -> None:
        own = {
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "examples"), *sys.path]),
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "dataset_calls.py")],
            env=kept | own | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
