"""The bytes around a tensor's values that make them a file of ``torch.save``, and DCP's metadata."""

from __future__ import annotations

import os
import pickle
import struct
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ALIGN = 64  # of values in a torch.save file, relative to its start; so files start at multiples too
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of the zip format (APPNOTE 4.3.7)
RECORD = b"archive/data/0"


@lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What comes before and after the values of a contiguous tensor in its ``torch.save`` file.

    Cost: 0.2 ms, and no memory for the values: they are a hole in an unlinked file.
    """
    fd = os.memfd_create("ptx-frame")
    try:
        with torch.serialization.skip_data(), os.fdopen(os.dup(fd), "wb") as file:
            # Never touched, so never allocated.
            torch.save(torch.empty(sizes, dtype=dtype, device="cpu"), file)
        size, nbytes = os.fstat(fd).st_size, torch.Size(sizes).numel() * dtype.itemsize
        start = _values_start(os.pread(fd, min(size, 2**16), 0))
        tail = os.pread(fd, size - start - nbytes, start + nbytes)
        return os.pread(fd, start, 0), tail
    finally:
        os.close(fd)


def _values_start(head: bytes) -> int:
    """Offset of the values: behind the local header of their record."""
    name = head.index(RECORD)
    *_, name_length, extra_length = LOCAL_HEADER.unpack(head[name - LOCAL_HEADER.size : name])
    assert name_length == len(RECORD), "torch.save lays out its files in another way"
    start: int = name + name_length + extra_length
    assert start % ALIGN == 0, "torch.save aligns values in another way"
    return start


def dcp_metadata(tensors: Any, pieces: Any, file_of: Any) -> bytes:
    """The ``.metadata`` that makes the data files of all ranks one checkpoint of torch's DCP.

    Args:
        tensors: `Spec` of each tensor by name.
        pieces: `Piece`s of each rank.
        file_of: The file name of a rank.
    """
    metadata = {
        name: TensorStorageMetadata(TensorProperties(spec.dtype), torch.Size(spec.shape), [])
        for name, spec in tensors.items()
    }
    storage = {}
    for rank, some in enumerate(pieces):
        at = 0
        for piece in some:
            offsets, sizes = map(torch.Size, piece.box)
            chunks = metadata[piece.name].chunks
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            key = MetadataIndex(piece.name, offsets, len(chunks) - 1)
            storage[key] = _StorageInfo(file_of(rank), at, piece.end - at)
            at = -(-piece.end // ALIGN) * ALIGN
    return pickle.dumps(Metadata(dict(metadata), storage_data=storage))
