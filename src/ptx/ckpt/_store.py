"""Where the steps are, as trainer, writers and readers use it: a folder here; URLs are in `_remote`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ptx.ckpt import _disk
from ptx.ckpt._copy import copy_verified
from ptx.ckpt._lock import LocalLockFile, LockFile
from ptx.ckpt._manifest import check_manifest
from ptx.ckpt._reading import discard_unread, reading

# At a URL each attempt has a folder of its own; its number rises with time, and the highest counts.
ATTEMPT = re.compile(r"step-(0|[1-9][0-9]*)-([0-9a-f]{16})")


class Store(Protocol):
    """A root. Folders of attempts are named relative to it, steps by their whole path or URL.

    Attributes:
        look_seconds: Between looks for the other ranks' parts: at first, and at most.
    """

    root: str
    look_seconds: tuple[float, float]

    def create(self) -> None: ...
    def leave(self, name: str) -> None: ...
    def has(self, name: str) -> bool: ...
    def take(self, name: str) -> None: ...
    def content(self) -> list[str] | None: ...
    def lock_file(self) -> LockFile: ...

    def attempt(self, step: int, token: int) -> str: ...
    def committed_path(self, step: int, folder: str) -> str: ...
    def path(self, folder: str) -> str: ...
    def make(self, folder: str) -> None: ...
    def names(self, folder: str) -> set[str]: ...
    def read(self, folder: str, name: str) -> bytes: ...
    def write(self, folder: str, name: str, data: bytes) -> None: ...
    def settle(self, folder: str) -> None: ...
    def copy_in(self, folder: str, source: str, entry: Any, go_on: Callable[[], None]) -> None: ...
    def commit(
        self, folder: str, step: int, manifest: bytes, parts: list[str], may: Callable[[], None]
    ) -> None: ...
    def is_committed(self, step: int, folder: str) -> bool: ...
    def discard(self, folder: str) -> None: ...
    def leftovers(self) -> list[str]: ...

    def folders(self) -> list[tuple[int, str]]: ...
    def replaced(self, step: int, folder: str) -> list[str]: ...
    def is_there(self, path: str) -> bool: ...
    def has_manifest(self, path: str) -> bool: ...
    def manifest(self, path: str) -> tuple[bytes, Any]: ...
    def check_sizes(self, path: str, manifest: Any) -> None: ...
    def check_chunks(self, path: str, entry: Any, chunks: list[int] | None = None) -> None: ...
    def modified(self, path: str) -> float | None: ...
    def reading(self, path: str) -> AbstractContextManager[None]: ...
    def discard_unread(self, path: str) -> bool: ...


def open_store(root: str | os.PathLike[str]) -> Store:
    """A URL such as ``s3://bucket/run`` goes through fsspec, anything else is a folder.

    Raises:
        ValueError: A URL, and fsspec or what it needs for this protocol isn't installed.
    """
    text = os.fspath(root)
    if is_url(text):
        from ptx.ckpt._remote import RemoteStore

        return RemoteStore(text)
    return LocalStore(os.path.abspath(text))


def is_url(root: str | os.PathLike[str]) -> bool:
    text = os.fspath(root)
    return "://" in text or "::" in text


class LocalStore:
    """A folder that all ranks share. A save is a hidden folder, which one rename turns into step-N."""

    look_seconds = (0.001, 0.1)

    def __init__(self, root: str) -> None:
        self.root = root

    def create(self) -> None:
        if not os.path.isdir(self.root):
            os.makedirs(self.root, exist_ok=True)
            _disk.sync_folder(os.path.dirname(self.root))

    def leave(self, name: str) -> None:
        os.close(os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))

    def has(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def take(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def content(self) -> list[str] | None:
        return sorted(os.listdir(self.root)) if os.path.isdir(self.root) else None

    def lock_file(self) -> LockFile:
        return LocalLockFile(self.root)

    def attempt(self, step: int, token: int) -> str:
        return f".saving-{step}-{token:016x}"

    def committed_path(self, step: int, folder: str) -> str:
        return self.path(f"step-{step}")

    def path(self, folder: str) -> str:
        return os.path.join(self.root, folder)

    def make(self, folder: str) -> None:
        os.mkdir(self.path(folder))

    def names(self, folder: str) -> set[str]:
        return set(os.listdir(self.path(folder)))

    def read(self, folder: str, name: str) -> bytes:
        with open(os.path.join(self.path(folder), name), "rb") as file:
            return file.read()

    def write(self, folder: str, name: str, data: bytes) -> None:
        """A whole file or none; its name is durable after ``settle``."""
        _disk.write_whole(os.path.join(self.path(folder), name), data)

    def settle(self, folder: str) -> None:
        _disk.sync_folder(self.path(folder))

    def copy_in(self, folder: str, source: str, entry: Any, go_on: Callable[[], None]) -> None:
        """Copy a staged file to ``entry["name"]``, verified on the way, and sync it."""
        ensure_room(self.path(folder), entry["bytes"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(os.path.join(self.path(folder), entry["name"]), flags, 0o666)
        try:
            copy_verified(source, entry, lambda chunk: _disk.write_all(fd, chunk), go_on)
            os.fsync(fd)
        finally:
            os.close(fd)

    def commit(
        self, folder: str, step: int, manifest: bytes, parts: list[str], may: Callable[[], None]
    ) -> None:
        path = self.path(folder)
        _disk.write_whole(os.path.join(path, _disk.MANIFEST), manifest)
        for name in parts:
            os.unlink(os.path.join(path, name))
        _disk.sync_folder(path)
        may()
        self._rename(folder, step)
        _disk.sync_folder(self.root)

    def is_committed(self, step: int, folder: str) -> bool:
        try:
            _, manifest = self.manifest(self.committed_path(step, folder))
        except _disk.DamagedError:
            return False
        return bool(manifest["attempt"] == folder)

    def discard(self, folder: str) -> None:
        _disk.discard(self.root, folder)

    def leftovers(self) -> list[str]:
        return _disk.leftovers(self.root)

    def folders(self) -> list[tuple[int, str]]:
        """Steps that were committed, or look so; the newest first."""
        return list(reversed(_disk.step_folders(self.root).items()))

    def replaced(self, step: int, folder: str) -> list[str]:
        """What a new commit of a step has put aside."""
        found = [(name, _disk.REPLACED.fullmatch(name)) for name in os.listdir(self.root)]
        return [self.path(name) for name, match in found if match and int(match[1]) == step]

    def is_there(self, path: str) -> bool:
        return os.path.isdir(path)

    def has_manifest(self, path: str) -> bool:
        return os.path.exists(os.path.join(path, _disk.MANIFEST))

    def manifest(self, path: str) -> tuple[bytes, Any]:
        raw, manifest = _disk.read_manifest(path)
        name = os.path.basename(path)
        if match := _disk.STEP.fullmatch(name) or _disk.REPLACED.fullmatch(name):
            check_manifest(os.path.join(path, _disk.MANIFEST), manifest, int(match[1]))
        return raw, manifest

    def check_sizes(self, path: str, manifest: Any) -> None:
        _disk.check_sizes(path, manifest)

    def check_chunks(self, path: str, entry: Any, chunks: list[int] | None = None) -> None:
        _disk.check_chunks(path, entry, chunks)

    def modified(self, path: str) -> float | None:
        """When a step was committed, in seconds since 1970."""
        return os.stat(os.path.join(path, _disk.MANIFEST)).st_mtime

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        with reading(os.path.join(path, _disk.MANIFEST)):
            yield

    def discard_unread(self, path: str) -> bool:
        return discard_unread(self.root, os.path.basename(path))

    def _rename(self, folder: str, step: int) -> None:
        """The commit. A step of this number that is there makes room, and comes back if this fails."""
        target, token = self.path(f"step-{step}"), os.urandom(6).hex()
        aside = self.path(f".replaced-{step}-{token}")
        if os.path.isdir(target) and not self.has_manifest(target):
            aside = self.path(f"step-{step}.before-{token}")  # not ours to delete
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)
        try:
            os.rename(self.path(folder), target)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside, target)
            raise


def ensure_room(folder: str, nbytes: int) -> None:
    """Raise if so many bytes don't fit: rather now than after writing for minutes."""
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes don't fit", folder)
