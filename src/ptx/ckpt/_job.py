"""What the threads of a writer process share: its configuration, and what became of each job."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._store import Store


class Shared:
    """Of one writer.

    Attributes:
        alone: Since when nobody sends jobs any more; 0: that isn't so.
        aborted: Jobs that the trainers gave up.
        failed: Jobs that failed here, and were reported.
    """

    def __init__(self, config: Any, store: Store) -> None:
        self.rank: int = config["rank"]
        self.config = config
        self.store = store
        self.alone = 0.0
        self.aborted: set[int] = set()
        self.failed: set[int] = set()
        self._reporting = threading.Lock()  # a long line is written in parts

    def report(self, job: Any, event: str, **more: Any) -> None:
        line = json.dumps({"seq": job["seq"], "event": event, **more}) + "\n"
        with self._reporting, contextlib.suppress(OSError):  # the trainer is dead
            os.write(1, line.encode())

    def go_on(self, job: Any) -> None:
        """Raise if a job is given up."""
        if job["seq"] in self.aborted | self.failed:
            raise RuntimeError("aborted, as another rank failed")

    def abort(self, job: Any, event: str, error: Exception) -> None:
        """Tell the trainer, and through the folder the writer of rank 0."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            text = f"{error}; the folder is gone: deleted, or another rank failed first"
        known = job["seq"] in self.failed
        self.failed.add(job["seq"])
        self.report(job, event, text="" if known else text)
        # Without space, or a folder, the trainers agree on it without this.
        if not known:
            with contextlib.suppress(Exception):
                self.store.write(job["folder"], _disk.abort_file(self.rank), text.encode())
        if self.rank == 0:
            with contextlib.suppress(Exception):
                self.store.discard(job["folder"])
