"""Tokens on disk, made once: by one process of a host, while the others wait for the files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from batches import Tokens

WAIT = 6 * 3600.0  # seconds for another process to tokenise, which may take hours
_POLL = 0.1  # seconds


def cached_tokens(
    folder: Path,
    key: str,
    dtype: npt.DTypeLike,
    make: Callable[[TokenFile, TokenFile], None],
    *,
    wait: float = WAIT,
) -> tuple[Tokens, Tokens]:
    """Maps ``folder``'s tokens to train on and to validate on, and calls ``make`` if there are none.

    Files appear whole or not at all. Of several processes the first makes them; where the file
    system has no locks each makes its own, with equal bytes, and the last one's stay.

    Args:
        folder: Made if it isn't there.
        key: Names the contents. Equal keys mean equal tokens.
        dtype: Of the tokens.
        make: Appends tokens to the two files it is given: to train on, and held out.
        wait: Seconds to wait for another process that is making them.

    Returns:
        Two memory-mapped arrays: ranks of a host share the memory.

    Raises:
        OSError: The disk is full, or the folder can't be written.
        ValueError: The wait was in vain, or the process waited for has failed.
    """
    paths = [folder / f"{key}-{part}.npy" for part in ("train", "valid")]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder / f".{key}.lock", wait=wait):
            if not all(path.exists() for path in paths):
                with TokenFile(paths[0], dtype) as train, TokenFile(paths[1], dtype) as valid:
                    make(train, valid)
    first, second = (np.load(path, mmap_mode="r") for path in paths)
    return first, second


@contextlib.contextmanager
def one_at_a_time(path: Path, *, wait: float = WAIT) -> Iterator[None]:
    """Holds a lock on ``path`` that ends with its process, however that ends.

    If the body fails, those who are waiting fail as well, with the same message: they would only
    fail in the same way, one after the other.

    Raises:
        ValueError: Another process still had it after ``wait`` seconds, or has failed.
    """
    began = time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as lock:
        while not _try_lock(lock):
            if time.time() - began > wait:
                raise ValueError(
                    f"one_at_a_time: waited {wait:.0f} s for another process, which is making what"
                    f" {path} stands for; look at its output, and start again when it is done"
                )
            time.sleep(_POLL)
        lock.seek(0)
        when, _, said = lock.read().partition(" ")
        if said and float(when) >= began:
            raise ValueError(f"the process of this host that was to do it failed: {said}")
        try:
            yield
        except Exception as error:
            with contextlib.suppress(OSError):  # the disk may be full
                lock.truncate(0)
                lock.write(f"{time.time()} {error}")
                lock.flush()
            raise


class TokenFile:
    """An ``.npy`` file that tokens are appended to, and that appears under its name when closed.

    Args:
        path: Another process may write the same one at the same time.
        dtype: Of the tokens.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        self.part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")

    def append(self, tokens: npt.ArrayLike) -> None:
        """Writes more tokens, [n] integers that fit ``dtype``."""
        block = np.asarray(tokens)
        assert block.ndim == 1
        if block.size:
            assert block.min() >= 0
            assert block.max() <= np.iinfo(self.dtype).max
        with self._named_if_full():
            self.file.write(block.astype(self.dtype).tobytes())
        self.length += block.size

    def __enter__(self) -> Self:
        self.file = _create(self.part)
        with self._named_if_full():
            self._write_header()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with self._named_if_full():
                    # numpy leaves room for the length to grow (GROWTH_AXIS_MAX_DIGITS).
                    self.file.seek(0)
                    self._write_header()
                    self.file.flush()
                    os.fsync(self.file.fileno())
                os.replace(self.part, self.path)
        finally:
            with contextlib.suppress(OSError):
                self.file.close()
            self.part.unlink(missing_ok=True)

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        np.lib.format.write_array_header_1_0(self.file, header)

    @contextlib.contextmanager
    def _named_if_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.path.parent).free
            raise OSError(
                error.errno,
                f"the disk of {self.path.parent} is full, or its quota used up: {free / 1e9:.2f} GB"
                f" are free, and {self.length * self.dtype.itemsize / 1e9:.2f} GB of tokens were"
                " written and are removed again; make room, or name another cache folder",
            ) from error


def _create(path: Path) -> IO[bytes]:
    return path.open("wb")


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # A file system without locks: each process does the work, and renames what it made.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
