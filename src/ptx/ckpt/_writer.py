"""The writer process: streams a rank's staged bytes to disk; that of rank 0 also commits the step.

A stand-alone script (``python -I _writer.py``) that doesn't import torch, so it starts in no time and
holds no memory of its own. It reads jobs from stdin and reports on stdout, a JSON line each; the
bytes are in memfds that it shares with the trainer. Once it is told so, or the trainer dies, it
finishes what it has, waits a limited time for the other ranks, and exits.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import signal
import sys
import threading
import time
from typing import Any

CONFIG = json.loads(sys.argv[1])
# The trainer's ptx, not another one that is installed; its other modules then come from there, too.
sys.path.insert(0, CONFIG["ptx"])
import ptx  # noqa: E402, F401

del sys.path[0]
sys.path += CONFIG["path"]  # of xxhash and fsspec

import xxhash  # noqa: E402

from ptx.ckpt import _disk  # noqa: E402
from ptx.ckpt._commit import commit  # noqa: E402
from ptx.ckpt._fan_out import Stage  # noqa: E402
from ptx.ckpt._job import Shared  # noqa: E402
from ptx.ckpt._lock import keep_beating  # noqa: E402
from ptx.ckpt._retain import retain  # noqa: E402
from ptx.ckpt._store import ensure_room, open_store  # noqa: E402

PARENT_SECONDS = 0.5  # between looks whether the trainer lives


class Writer:
    """Three threads: one writes, one copies what is staged, and on rank 0 one commits."""

    def __init__(self, config: Any) -> None:
        self.shared = Shared(config, open_store(config["root"]))
        self.stage: Stage | None = None
        if config["stage"]:
            self.stage = Stage(self.shared, config["stage"], len(config["slots"]))
        self._maps: dict[int, mmap.mmap] = {}

    def run(self) -> None:
        to_write: queue.SimpleQueue[Any] = queue.SimpleQueue()
        to_commit: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._write_loop, args=(to_write,)).start()
        threading.Thread(target=self._commit_loop, args=(to_commit,)).start()
        if self.shared.rank == 0:
            held = (self.shared.store.lock_file(), self.shared.config["lock"])
            threading.Thread(target=keep_beating, args=held, daemon=True).start()
        try:
            for job in self._jobs():
                if "abort" in job:
                    self.shared.aborted.add(job["abort"])
                    continue
                own, *rest = self._sections(job)
                to_write.put((job, own))
                if self.shared.rank == 0:
                    to_commit.put((job, *rest))
        finally:  # the threads end, whatever happened here
            self.shared.alone = time.monotonic()
            to_write.put(None)
            to_commit.put(None)

    def _jobs(self) -> Any:
        """Lines of stdin, until one says so, or the trainer is gone.

        The end of the pipe alone would not do: forks of the trainer hold it open.
        """
        rest = b""
        while True:
            if not select.select([0], [], [], PARENT_SECONDS)[0]:
                if os.getppid() != self.shared.config["parent"]:
                    return
                continue
            data = os.read(0, 2**16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if "finish" in job:
                    return
                yield job

    def _write_loop(self, jobs: Any) -> None:
        try:
            while (item := jobs.get()) is not None:
                job, own = item
                try:
                    self._write_part(job, json.loads(own))
                except Exception as error:
                    self.shared.abort(job, "unwritten", error)
        finally:
            if self.stage:
                self.stage.finish()

    def _write_part(self, job: Any, part: Any) -> None:
        """This rank's data file, and what the manifest says about it."""
        store, folder = self.shared.store, job["folder"]
        for name in job["leftovers"]:
            store.discard(name)
        with self._slot(job) as slot, slot[: job["data_bytes"]] as data:
            if self.stage:
                path = self.stage.place(job)
                try:
                    part["file"] = self._write_data(job, path, data, sync=False)
                except BaseException:
                    self.stage.drop(path)
                    raise
                self.stage.hand_over(job, part, path)
                return
            path = os.path.join(store.path(folder), _disk.data_file(self.shared.rank))
            part["file"] = self._write_data(job, path, data, sync=True)
        store.write(
            folder, _disk.rank_file(self.shared.rank), _disk.seal(json.dumps(part).encode())
        )
        store.settle(folder)
        self.shared.report(job, "written")

    def _sections(self, job: Any) -> list[bytes]:
        """What comes with the data: this rank's part; of rank 0 also the manifest and DCP's metadata."""
        at, found = job["data_bytes"], []
        with self._slot(job) as slot:
            for size in job["sections"]:
                found.append(bytes(slot[at : at + size]))
                at += size
        return found

    def _slot(self, job: Any) -> memoryview:
        fd, size = self.shared.config["slots"][job["slot"]], job["slot_bytes"]
        known = self._maps.get(fd)
        if known is None or len(known) != size:
            self._maps[fd] = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        return memoryview(self._maps[fd])

    def _write_data(self, job: Any, path: str, data: memoryview, sync: bool) -> Any:
        if not data:
            return None
        ensure_room(os.path.dirname(path), len(data))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            chunks = [
                data[start : start + _disk.CHUNK_BYTES]
                for start in range(0, len(data), _disk.CHUNK_BYTES)
            ]
            for chunk in chunks:
                # In one call: the page cache then uses large pages, which a load maps in no time.
                _disk.write_all(fd, chunk)
                if job["seq"] in self.shared.aborted:
                    raise RuntimeError("aborted, as another rank failed")
            # Of what was staged, not of what the page cache has; while the disk is busy anyway.
            hashes = threading.Thread(
                target=lambda: sums.extend(map(xxhash.xxh3_64_hexdigest, chunks))
            )
            sums: list[str] = []
            hashes.start()
            try:
                if sync:
                    os.fsync(fd)
            finally:
                hashes.join()
        finally:
            os.close(fd)
        return {"name": _disk.data_file(self.shared.rank), "bytes": len(data), "xxh3_64": sums}

    def _commit_loop(self, jobs: Any) -> None:
        while (item := jobs.get()) is not None:
            job, body, dcp = item
            try:
                commit(self.shared, job, body, dcp)
            except Exception as error:
                self.shared.abort(job, "failed", error)
            else:
                self.shared.report(job, "committed")
                with contextlib.suppress(Exception):  # costs space only, and is tried again
                    retain(self.shared.store, job)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop, and tells
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Writer(CONFIG).run()
