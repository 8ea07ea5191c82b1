"""Copy a staged file to where it is going, chunk by chunk, and only if its bytes are those staged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import xxhash

from ptx.ckpt import _disk


def copy_verified(
    source: str, entry: Any, write: Callable[[memoryview], object], go_on: Callable[[], None]
) -> None:
    """Hand each chunk of ``source`` to ``write``, after comparing it with its checksum.

    Args:
        source: A file's path.
        entry: What the manifest will say of it; the checksums are those of the slot's memory.
        write: Takes the next bytes.
        go_on: Called before each chunk, to raise if the save was given up.

    Raises:
        RuntimeError: The file has other bytes than were staged.
    """
    buffer = memoryview(bytearray(min(_disk.CHUNK_BYTES, entry["bytes"])))
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for chunk, checksum in enumerate(entry["xxh3_64"]):
            go_on()
            start = chunk * _disk.CHUNK_BYTES
            part = buffer[: min(_disk.CHUNK_BYTES, entry["bytes"] - start)]
            done = 0
            while done < len(part) and (count := os.preadv(fd, [part[done:]], start + done)):
                done += count
            if done < len(part) or xxhash.xxh3_64_hexdigest(part) != checksum:
                raise RuntimeError(f"{source}, byte {start}: not what was staged")
            write(part)
    finally:
        os.close(fd)
