"""Steps that someone reads aren't deleted: a reader holds a shared lock, retention asks for the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from ptx.ckpt import _disk

TRIES = 8  # to find a file that is being replaced


@contextlib.contextmanager
def reading(manifest: str) -> Iterator[None]:
    """Meanwhile the step of a manifest is spared by retention, of other processes and hosts too.

    By ``flock``, which needs no write permission and ends with the process. Where a file system has
    none, or the file isn't there, this does nothing, and a reader may find the step gone.
    """
    fd = -1
    for _ in range(TRIES):
        try:
            fd = _disk.open_plain(manifest)
        except OSError:
            break
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(manifest)):
                break
        os.close(fd)  # renamed between the two calls
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def discard_unread(root: str, name: str) -> bool:
    """Delete a step's folder unless someone reads it; returns whether it is gone."""
    manifest = os.path.join(root, name, _disk.MANIFEST)
    fd = -1
    try:
        with contextlib.suppress(OSError):
            # Writable, as NFS wants it for an exclusive lock.
            fd = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # no locks here
        _disk.discard(root, name)
        return True
    finally:
        if fd >= 0:
            os.close(fd)
