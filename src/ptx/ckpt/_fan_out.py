"""Files staged on a disk of the node, and copied to the root in the background."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import threading
from typing import Any

import xxhash

from ptx.ckpt import _disk
from ptx.ckpt._job import Shared


class Stage:
    """This rank's folder below ``stage_dir``; one thread copies, in the order of the saves.

    Nothing here is synced, or ever read by a load: what a crash leaves is deleted by the next run on
    this root. Staged saves take at most ``limit`` files; the next one waits, and so keeps its slot.

    Args:
        shared: Of this process.
        stage_dir: Other ranks and other runs may use it as well.
        limit: Files that may be there at once.
    """

    def __init__(self, shared: Shared, stage_dir: str, limit: int) -> None:
        self.shared = shared
        mark = f"ptx-stage-{xxhash.xxh3_64_hexdigest(os.fsencode(shared.store.root))}-"
        own = f"{mark}{shared.config['run']}"
        self.folder = os.path.join(stage_dir, f"{own}-rank-{shared.rank:05d}")
        os.makedirs(stage_dir, exist_ok=True)
        for name in os.listdir(stage_dir):
            # Of earlier runs, whichever rank's: this run holds the root's lock.
            path = os.path.join(stage_dir, name)
            if name.startswith(mark) and (not name.startswith(own) or path == self.folder):
                shutil.rmtree(path, ignore_errors=True)
        os.makedirs(self.folder)
        self._room = threading.Semaphore(limit)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._loop).start()

    def place(self, job: Any) -> str:
        """Where to write a job's file, once there is room for one more."""
        self._room.acquire()
        return os.path.join(self.folder, f"step-{job['step']}-{job['seq']}.distcp")

    def hand_over(self, job: Any, part: Any, path: str) -> None:
        """Copy a staged file from now on; its slot is free."""
        self._jobs.put((job, part, path))
        self.shared.report(job, "staged")

    def drop(self, path: str) -> None:
        """Delete a staged file, and make room for another."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._room.release()

    def finish(self) -> None:
        self._jobs.put(None)

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, part, path = item
            try:
                self._copy(job, part, path)
            except Exception as error:
                self.shared.abort(job, "unwritten", error)
            else:
                self.shared.report(job, "written")
            finally:
                self.drop(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _copy(self, job: Any, part: Any, path: str) -> None:
        store, rank = self.shared.store, self.shared.rank
        if part["file"]:
            store.copy_in(job["folder"], path, part["file"], lambda: self.shared.go_on(job))
        part_file = _disk.seal(json.dumps(part).encode())
        store.write(job["folder"], _disk.rank_file(rank), part_file)
        store.settle(job["folder"])
