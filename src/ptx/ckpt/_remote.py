"""Roots that are URLs, through fsspec: no renames, so a step is there once its manifest is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import xxhash

from ptx.ckpt import _disk
from ptx.ckpt._copy import copy_verified
from ptx.ckpt._lock import LOCK, LockFile
from ptx.ckpt._manifest import check_manifest
from ptx.ckpt._store import ATTEMPT


class RemoteStore:
    """A root that fsspec can write to. No file is ever written twice, but for the lock.

    Args:
        url: Such as ``s3://bucket/run``. Options of the file system come from fsspec's
            configuration, which the writer process reads as well.
    """

    look_seconds = (0.2, 2.0)

    def __init__(self, url: str) -> None:
        try:
            core = import_module("fsspec.core")
        except ImportError:
            raise ValueError(
                f"AsyncCheckpointer: {url!r} needs fsspec; pip install fsspec, and what it asks for"
                " this protocol (s3fs, gcsfs, ...)"
            ) from None
        self.root = url.rstrip("/")
        try:
            # Listings are of what others write, so never cached ones.
            self.fs, path = core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError) as problem:
            raise ValueError(f"AsyncCheckpointer: {url!r}: {problem}") from None
        self.base = str(path).rstrip("/")

    def create(self) -> None:
        self.fs.makedirs(self.base, exist_ok=True)

    def leave(self, name: str) -> None:
        self.fs.pipe_file(self._inside(name), b"x")  # some object stores refuse empty ones

    def has(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self._inside(name)))

    def take(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._inside(name))

    def content(self) -> list[str] | None:
        return sorted(self._list(self.base)) if self.fs.exists(self.base) else None

    def lock_file(self) -> LockFile:
        return RemoteLockFile(self.fs, self._inside(LOCK))

    def attempt(self, step: int, token: int) -> str:
        return f"step-{step}-{token:016x}"

    def committed_path(self, step: int, folder: str) -> str:
        return self.path(folder)

    def path(self, folder: str) -> str:
        return f"{self.root}/{folder}"

    def make(self, folder: str) -> None:
        self.fs.makedirs(self._inside(folder), exist_ok=True)

    def names(self, folder: str) -> set[str]:
        return set(self._list(self._inside(folder)))

    def read(self, folder: str, name: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self._inside(folder)}/{name}"))

    def write(self, folder: str, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self._inside(folder)}/{name}", data)

    def settle(self, folder: str) -> None:
        """Nothing: what is uploaded is durable."""

    def copy_in(self, folder: str, source: str, entry: Any, go_on: Callable[[], None]) -> None:
        """Upload a staged file to ``entry["name"]``, verified on the way."""
        target = f"{self._inside(folder)}/{entry['name']}"
        file = self.fs.open(target, "wb")
        try:
            copy_verified(source, entry, file.write, go_on)
        except BaseException:
            _give_up(file)
            raise
        file.close()
        if (size := self.fs.size(target)) != entry["bytes"]:
            raise RuntimeError(f"{target} has {size} bytes after the upload, not {entry['bytes']}")

    def commit(
        self, folder: str, step: int, manifest: bytes, parts: list[str], may: Callable[[], None]
    ) -> None:
        may()
        # Whole or not there: a rename where there are renames, elsewhere a copy of an object.
        path = f"{self._inside(folder)}/{_disk.MANIFEST}"
        self.fs.pipe_file(f"{path}.part", manifest)
        self.fs.mv(f"{path}.part", path)
        for name in parts:
            with contextlib.suppress(OSError):  # costs a few bytes only
                self.fs.rm_file(f"{self._inside(folder)}/{name}")

    def is_committed(self, step: int, folder: str) -> bool:
        try:
            self.manifest(self.path(folder))
        except _disk.DamagedError:
            return False
        return True

    def discard(self, folder: str) -> None:
        """The manifest first: half a step is none."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self._inside(folder)}/{_disk.MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._inside(folder), recursive=True)

    def leftovers(self) -> list[str]:
        """Attempts that were never committed."""
        names = [name for name in self._list(self.base) if ATTEMPT.fullmatch(name)]
        return [name for name in names if not self.has_manifest(self.path(name))]

    def folders(self) -> list[tuple[int, str]]:
        """Attempts that were committed, or may become so; the newest first."""
        matches = filter(None, map(ATTEMPT.fullmatch, self._list(self.base)))
        order = sorted(((int(m[1]), m[2], m[0]) for m in matches), reverse=True)
        found = [(step, self.path(name)) for step, _, name in order]
        return [(step, path) for step, path in found if self.has_manifest(path)]

    def replaced(self, step: int, folder: str) -> list[str]:
        """Older attempts of a step that was committed anew."""
        return [
            path for other, path in self.folders() if other == step and path != self.path(folder)
        ]

    def is_there(self, path: str) -> bool:
        return self.has_manifest(path)

    def has_manifest(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(f"{self._inside(_name(path))}/{_disk.MANIFEST}"))

    def manifest(self, path: str) -> tuple[bytes, Any]:
        url = f"{path}/{_disk.MANIFEST}"
        try:
            raw = self.read(_name(path), _disk.MANIFEST)
        except FileNotFoundError:
            raise _disk.DamagedError(url, 0, "it isn't there") from None
        manifest = _disk.unseal(url, raw)
        if match := ATTEMPT.fullmatch(_name(path)):
            check_manifest(url, manifest, int(match[1]))
        return raw, manifest

    def check_sizes(self, path: str, manifest: Any) -> None:
        inside = self._inside(_name(path))
        self.fs.invalidate_cache()
        found = self.fs.ls(inside, detail=True) if self.fs.exists(inside) else []
        sizes = {_name(one["name"]): one["size"] for one in found}
        for entry in manifest["files"]:
            url, size = f"{path}/{entry['name']}", sizes.get(entry["name"])
            if size is None:
                raise _disk.DamagedError(url, 0, "it isn't there")
            if size != entry["bytes"]:
                at = min(size, entry["bytes"])
                raise _disk.DamagedError(url, at, f"{size} bytes, not {entry['bytes']}")

    def check_chunks(self, path: str, entry: Any, chunks: list[int] | None = None) -> None:
        for chunk in range(len(entry["xxh3_64"])) if chunks is None else chunks:
            self.fetch(path, entry, chunk)

    def fetch(self, path: str, entry: Any, chunk: int) -> bytes:
        """A chunk of a file, verified; raises `_disk.DamagedError`, or what the network raises."""
        url, start = f"{path}/{entry['name']}", chunk * _disk.CHUNK_BYTES
        stop = min(start + _disk.CHUNK_BYTES, entry["bytes"])
        try:
            inside = f"{self._inside(_name(path))}/{entry['name']}"
            data = bytes(self.fs.cat_file(inside, start=start, end=stop))
        except FileNotFoundError:
            raise _disk.DamagedError(url, 0, "it isn't there") from None
        if len(data) != stop - start:
            raise _disk.DamagedError(url, start + len(data), "the file ends here")
        if xxhash.xxh3_64_hexdigest(data) != entry["xxh3_64"][chunk]:
            reason = f"the checksum of {stop - start} bytes doesn't match"
            raise _disk.DamagedError(url, start, reason)
        return data

    def modified(self, path: str) -> float | None:
        """When the attempt began: not every file system tells more."""
        match = ATTEMPT.fullmatch(_name(path))
        return None if match is None else (int(match[2], 16) >> 20) / 1e3

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Nothing: there are no locks of readers here; a load that finds its step gone looks again."""
        yield

    def discard_unread(self, path: str) -> bool:
        self.discard(_name(path))
        return True

    def _inside(self, name: str) -> str:
        return f"{self.base}/{name}"

    def _list(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [_name(one) for one in self.fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []  # object stores have no empty folders


class RemoteLockFile:
    """An object; the last sign of life is a time in it, so hosts' clocks should agree to a minute."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path

    def create(self, data: bytes) -> None:
        data = _with_time(data)
        try:
            self._fs.pipe_file(self._path, data, mode="create")
            return
        except (TypeError, ValueError, NotImplementedError):
            pass  # this file system can't write only if nothing is there
        if self._fs.exists(self._path):
            raise FileExistsError(self._path)
        self._fs.pipe_file(self._path, data)

    def read(self) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            return bytes(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return None

    def age(self, data: bytes) -> float:
        try:
            return time.time() - float(json.loads(data).get("beat", 0.0))
        except ValueError:
            return math.inf  # half of one, of a writer that died: stores replace objects whole

    def beat(self, data: bytes) -> None:
        self._fs.pipe_file(self._path, _with_time(data))

    def take_away(self, data: bytes) -> None:
        found = self.read()
        if found is not None and _token(found) == _token(data):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path)


def _give_up(file: Any) -> None:
    """End an upload without completing it; a plain file just ends here."""
    with contextlib.suppress(Exception):
        file.discard()
    try:
        file.closed = True  # or its finaliser would complete it
    except AttributeError:
        file.close()


def _with_time(data: bytes) -> bytes:
    return json.dumps({**json.loads(data), "beat": time.time()}).encode()


def _token(data: bytes) -> Any:
    try:
        return json.loads(data)["token"]
    except (ValueError, KeyError, TypeError):
        return data


def _name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))
