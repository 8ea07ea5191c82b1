"""One job at a time saves to a root: a small file names the holder, who shows that it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from typing import Any, Protocol

LOG = logging.getLogger("ptx.ckpt")
LOCK = ".lock"  # in the root
BEAT_SECONDS = 10.0  # between signs of life
STALE_SECONDS = 120.0  # without one, a holder on another host is taken for dead
TRIES = 8  # when others take and release it meanwhile, or are writing it
WRITING_SECONDS = 0.1  # between tries, while it is being written
NAMES = {"token", "host", "machine", "pid", "started", "since"}  # in a lock


class LockFile(Protocol):
    """The lock's file, on some kind of storage."""

    def create(self, data: bytes) -> None:
        """Raises FileExistsError if there is one."""

    def read(self) -> bytes | None:
        """What is in it; None if there is none."""

    def age(self, data: bytes) -> float:
        """Seconds since its last sign of life."""

    def beat(self, data: bytes) -> None:
        """Give one; ``data``: what is in it."""

    def take_away(self, data: bytes) -> None:
        """Remove it if this is what is in it."""


class RootLock:
    """A root's lock, taken by the first ``hold``; made on rank 0.

    Args:
        file: Where it is.
        where: The root, for messages.
    """

    def __init__(self, file: LockFile, where: str) -> None:
        self.token = os.urandom(8).hex()
        self._file = file
        self._where = where
        self._data = b""  # once it is held
        self._pid = os.getpid()
        self._next_beat = 0.0

    def hold(self) -> None:
        """Take it, or make sure that it is still held.

        Raises:
            RuntimeError: Another job holds it, by host, process id and time; or took it meanwhile.
        """
        for _ in range(TRIES):
            found = _whole(self._file)
            if found is None:
                try:
                    self._create()
                except FileExistsError:
                    continue
                return
            holder = _holder(found)
            if self._data and holder.get("token") == self.token:
                return
            if self._data:
                raise RuntimeError(
                    f"save: {_described(holder)} has taken {self._where} over, as this job showed no"
                    f" sign of life for {STALE_SECONDS:.0f} seconds; stop one of the two"
                )
            if problem := self._why_held(holder, found):
                raise RuntimeError(
                    f"save: {self._where} is in use by {_described(holder)}, {problem}; wait for that"
                    " job's end or choose another folder"
                )
            LOG.warning("%s: taken over from %s, which is gone", self._where, _described(holder))
            self._file.take_away(found)
        raise RuntimeError(f"save: {self._where}: its lock changes hands all the time; try again")

    def beat(self) -> None:
        """Show a sign of life if it is time for one."""
        if self._data and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            with contextlib.suppress(Exception):  # the next save will tell
                self._file.beat(self._data)

    def release(self) -> None:
        if self._data and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # then it is stale soon
                self._file.take_away(self._data)
            self._data = b""

    def _create(self) -> None:
        data = json.dumps({"token": self.token, **_myself()}).encode()
        self._file.create(data)
        self._data, self._next_beat = data, time.monotonic() + BEAT_SECONDS

    def _why_held(self, holder: dict[str, Any], data: bytes) -> str:
        """Why a holder isn't gone; empty if it is."""
        if holder.get("machine") == _machine():
            if _started(holder["pid"]) != holder["started"]:
                return ""  # dead, or its number is now another's
            return "which is alive" if holder["pid"] != os.getpid() else "which is this process"
        age = self._file.age(data)
        if age > STALE_SECONDS:
            return ""
        return f"whose last sign of life is {max(age, 0.0):.0f} seconds old"


def still_held(file: LockFile, token: str) -> bool:
    """Whether a lock is that of ``token``; also where it was removed by hand."""
    data = _whole(file)
    return data is None or _holder(data).get("token") == token


def keep_beating(file: LockFile, token: str) -> None:
    """Show signs of life for ever, as long as the lock is that of ``token``."""
    while True:
        with contextlib.suppress(Exception):  # of a network, say; the next one may be fine
            data = file.read()
            if data is not None and _holder(data).get("token") == token:
                file.beat(data)
        time.sleep(BEAT_SECONDS)


class LocalLockFile:
    """A file; its time of modification is the last sign of life."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = os.path.join(root, LOCK)

    def create(self, data: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, data)
        except OSError:  # no space, say; an empty one would keep everyone out for a while
            os.unlink(self._path)
            raise
        finally:
            os.close(fd)

    def read(self) -> bytes | None:
        try:
            with open(self._path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def age(self, data: bytes) -> float:
        # By the file server's clock: both times are its own.
        probe = f"{self._path}-{os.urandom(6).hex()}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            return os.stat(probe).st_mtime - os.stat(self._path).st_mtime
        except FileNotFoundError:
            return 0.0  # released this moment
        finally:
            os.unlink(probe)

    def beat(self, data: bytes) -> None:
        os.utime(self._path)

    def take_away(self, data: bytes) -> None:
        # Others may do the same, and have a lock of their own here by now. On one machine this
        # keeps them apart; over several the loser is told by its next save, or by its commit.
        guard = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(guard, fcntl.LOCK_EX)
            if self.read() == data:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        finally:
            os.close(guard)


def _whole(file: LockFile) -> bytes | None:
    """What is in it; at a URL a sign of life writes it anew, and who reads then may see half of it."""
    for _ in range(TRIES):
        data = file.read()
        if data is None or _holder(data):
            break
        time.sleep(WRITING_SECONDS)
    return data


def _holder(data: bytes) -> dict[str, Any]:
    """Who wrote it; empty if it is being written, or damaged: then its age decides."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() >= NAMES else {}


def _described(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "a job without a readable name"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
    return f"process {holder['pid']} on {holder['host']} since {since}"


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
        "since": time.time(),
    }


def _machine() -> str:
    """Where process ids mean the same: this boot of this machine, in this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none that runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
