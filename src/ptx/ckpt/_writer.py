"""The writer process: streams a rank's staged bytes to disk; that of rank 0 also commits the step.

A stand-alone script (``python -I _writer.py``) that imports neither torch nor ptx, so it starts in
some 20 ms and holds no memory of its own. It reads jobs from stdin and reports on stdout, a JSON
line each; the bytes are in memfds that it shares with the trainer. Once it is told so, or the
trainer dies, it finishes what it has, waits a limited time for the other ranks, and exits.
"""

from __future__ import annotations

import contextlib
import errno
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
sys.path += CONFIG["path"]  # of this folder, and of xxhash

import _disk  # type: ignore[import-not-found]  # noqa: E402
import xxhash  # noqa: E402

LOOK_SECONDS = (0.001, 0.1)  # between looks for other ranks' parts: at first, and at most
PARENT_SECONDS = 0.5  # between looks whether the trainer lives


class _State:
    """What the threads share."""

    def __init__(self) -> None:
        self.alone = 0.0  # since when nobody sends jobs any more; 0: that isn't so
        self.aborted: set[int] = set()  # by the trainers
        self.failed: set[int] = set()  # here, and reported
        self.maps: dict[int, mmap.mmap] = {}


STATE = _State()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop, and tells
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    to_write: queue.SimpleQueue[Any] = queue.SimpleQueue()
    to_commit: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_write_loop, args=(to_write,)).start()
    threading.Thread(target=_commit_loop, args=(to_commit,)).start()
    try:
        for job in _jobs():
            if "abort" in job:
                STATE.aborted.add(job["abort"])
                continue
            own, *rest = _sections(job)
            to_write.put((job, own))
            if CONFIG["rank"] == 0:
                to_commit.put((job, *rest))
    finally:  # the threads end, whatever happened here
        STATE.alone = time.monotonic()
        to_write.put(None)
        to_commit.put(None)


def _jobs() -> Any:
    """Lines of stdin, until one says so, or the trainer is gone.

    The end of the pipe alone would not do: forks of the trainer hold it open.
    """
    rest = b""
    while True:
        if not select.select([0], [], [], PARENT_SECONDS)[0]:
            if os.getppid() != CONFIG["parent"]:
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


def _report(job: Any, event: str, **more: Any) -> None:
    line = json.dumps({"seq": job["seq"], "event": event, **more}) + "\n"
    with contextlib.suppress(OSError):  # the trainer is dead
        os.write(1, line.encode())


def _write_loop(jobs: Any) -> None:
    while (item := jobs.get()) is not None:
        job, own = item
        try:
            _write_part(job, own)
        except Exception as error:
            _abort(job, "unwritten", error)
        else:
            _report(job, "written")


def _write_part(job: Any, own: bytes) -> None:
    """This rank's data file, and what the manifest says about it."""
    folder = os.path.join(CONFIG["root"], job["folder"])
    for name in job["leftovers"]:
        _disk.discard(CONFIG["root"], name)
    part = json.loads(own)
    with _slot(job) as slot, slot[: job["data_bytes"]] as data:
        part["file"] = _write_data(job, folder, data)
    sealed = _disk.seal(json.dumps(part).encode())
    _disk.write_whole(os.path.join(folder, _disk.rank_file(CONFIG["rank"])), sealed)
    _disk.sync_folder(folder)


def _sections(job: Any) -> list[bytes]:
    """What comes with the data: this rank's part; of rank 0 also the manifest and DCP's metadata."""
    at, found = job["data_bytes"], []
    with _slot(job) as slot:
        for size in job["sections"]:
            found.append(bytes(slot[at : at + size]))
            at += size
    return found


def _slot(job: Any) -> memoryview:
    fd, size = CONFIG["slots"][job["slot"]], job["slot_bytes"]
    known = STATE.maps.get(fd)
    if known is None or len(known) != size:
        STATE.maps[fd] = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    return memoryview(STATE.maps[fd])


def _write_data(job: Any, folder: str, data: memoryview) -> Any:
    if not data:
        return None
    name = _disk.data_file(CONFIG["rank"])
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < len(data):  # rather now than after writing for minutes
        raise OSError(errno.ENOSPC, f"{len(data)} bytes don't fit", folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, name), flags, 0o666)
    try:
        chunks = [
            data[start : start + _disk.CHUNK_BYTES]
            for start in range(0, len(data), _disk.CHUNK_BYTES)
        ]
        for chunk in chunks:
            # In one call: the page cache then uses large pages, which a load maps in no time.
            _disk.write_all(fd, chunk)
            if job["seq"] in STATE.aborted:
                raise RuntimeError("aborted, as another rank failed")
        # Of what was staged, not of what the page cache has; while the disk is busy anyway.
        hashes = threading.Thread(target=lambda: sums.extend(map(xxhash.xxh3_64_hexdigest, chunks)))
        sums: list[str] = []
        hashes.start()
        try:
            os.fsync(fd)
        finally:
            hashes.join()
    finally:
        os.close(fd)
    return {"name": name, "bytes": len(data), "xxh3_64": sums}


def _abort(job: Any, event: str, error: Exception) -> None:
    """Tell the trainer, and through the folder the writer of rank 0."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError):
        text = f"{error}; the folder is gone: deleted, or another rank failed first"
    known = job["seq"] in STATE.failed
    STATE.failed.add(job["seq"])
    _report(job, event, text="" if known else text)
    if not known:
        folder = os.path.join(CONFIG["root"], job["folder"])
        with contextlib.suppress(OSError):  # no space, or no folder: the trainers agree without it
            _disk.write_whole(os.path.join(folder, _disk.abort_file(CONFIG["rank"])), text.encode())
    if CONFIG["rank"] == 0:
        with contextlib.suppress(OSError):
            _disk.discard(CONFIG["root"], job["folder"])


def _commit_loop(jobs: Any) -> None:
    while (item := jobs.get()) is not None:
        job, body, dcp = item
        try:
            _commit(job, body, dcp)
        except Exception as error:
            _abort(job, "failed", error)
        else:
            _report(job, "committed")
            with contextlib.suppress(OSError):  # costs space only, and is tried again
                _retain(job)


def _commit(job: Any, body: bytes, dcp: bytes) -> None:
    root = CONFIG["root"]
    folder = os.path.join(root, job["folder"])
    _disk.write_whole(os.path.join(folder, ".metadata"), dcp)  # while the data is being written
    chunks = range(0, len(dcp), _disk.CHUNK_BYTES)
    sums = [xxhash.xxh3_64_hexdigest(dcp[at : at + _disk.CHUNK_BYTES]) for at in chunks]
    parts = _wait_for_parts(job, folder)
    files = [part["file"] for part in parts if part["file"]]
    files.append({"name": ".metadata", "bytes": len(dcp), "xxh3_64": sums})
    more = {
        "files": files,
        "parts": _union([part["parts"] for part in parts], "parts"),
        "per_rank": [part["per_rank"] for part in parts],
        "meshes": [part["mesh"] for part in parts],
    }
    # The body may hold many MB of tensor index: spliced as text, not parsed.
    whole = body[:-1] + b"," + json.dumps(more).encode()[1:]
    _disk.write_whole(os.path.join(folder, _disk.MANIFEST), _disk.seal(whole))
    for rank in range(len(parts)):
        os.unlink(os.path.join(folder, _disk.rank_file(rank)))
    _disk.sync_folder(folder)

    _rename(root, job["folder"], job["step"])
    _disk.sync_folder(root)


def _rename(root: str, folder: str, step: int) -> None:
    """The commit. A step of this number that is there makes room, and comes back if this fails."""
    target, token = os.path.join(root, f"step-{step}"), os.urandom(6).hex()
    aside = os.path.join(root, f".replaced-{step}-{token}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, _disk.MANIFEST)):
        aside = os.path.join(root, f"step-{step}.before-{token}")  # not ours to delete
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, aside)
    try:
        os.rename(os.path.join(root, folder), target)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(aside, target)
        raise


def _wait_for_parts(job: Any, folder: str) -> list[Any]:
    start, own, world_size = time.monotonic(), 0.0, job["world_size"]
    while True:
        names = set(os.listdir(folder))
        if aborted := sorted(name for name in names if name.startswith("abort-")):
            raise RuntimeError(f"aborted by {', '.join(aborted)}")
        missing = [rank for rank in range(world_size) if _disk.rank_file(rank) not in names]
        if not missing:
            break
        if job["seq"] in STATE.aborted | STATE.failed:
            raise RuntimeError("aborted, as another rank failed")
        now = time.monotonic()
        own = own or (0.0 if 0 in missing else now)
        patience = CONFIG["orphan_seconds" if STATE.alone else "commit_seconds"]
        if own and now > max(own, STATE.alone) + patience:
            raise RuntimeError(f"the parts of ranks {missing[:8]} didn't arrive in time")
        shortest, longest = LOOK_SECONDS
        time.sleep(max(shortest, min(longest, (now - start) / 100)))
    parts = []
    for rank in range(world_size):
        path = os.path.join(folder, _disk.rank_file(rank))
        with open(path, "rb") as file:
            parts.append(_disk.unseal(path, file.read()))
    return parts


def _union(trees: list[Any], where: str) -> Any:
    """Of what the ranks hold of a model: names may be on some only, what several have is equal."""
    merged: Any = {}
    for tree in trees:
        for key, value in tree.items():
            if key not in merged:
                merged[key] = value
            elif isinstance(value, dict) and isinstance(merged[key], dict) and "$" not in value:
                merged[key] = _union([merged[key], value], f"{where}.{key}")
            elif merged[key] != value:
                raise RuntimeError(f"ranks disagree on {where}.{key}: {merged[key]} and {value}")
    return merged


def _retain(job: Any) -> None:
    """Delete what the new step replaced, and old ones; never the one just committed."""
    keep, every, root = job["keep"], job["keep_every"], CONFIG["root"]
    for name in os.listdir(root):
        if (match := _disk.REPLACED.fullmatch(name)) and int(match[1]) == job["step"]:
            _disk.discard(root, name)
    steps = [
        step
        for step, path in _disk.step_folders(root).items()
        if os.path.exists(os.path.join(path, _disk.MANIFEST))
    ]
    for step in steps[: -keep if keep else 0]:
        if step != job["step"] and not (every and step % every == 0):
            _disk.discard(root, f"step-{step}")


if __name__ == "__main__":
    main()
