"""Read this rank's part of a tensor from a file, a block at a time."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ptx.hf._safetensors import Entry
from ptx.parallel._init_draw import shard_of

# Bytes held at once; larger ones read no faster.
BLOCK = 2**23
# From this length on, pieces of rows are read one by one; below, whole rows are, and cut in memory.
_PIECE = 2**12

Shape = tuple[int, ...]


class Reader:
    """Reads with ``preadv`` into one buffer. Mapped files would count as memory of the process."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._file: tuple[Path, int] | None = None
        self.bytes_read = 0

    def __enter__(self) -> Reader:
        """Keeps one file open at a time."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        if self._file is not None:
            os.close(self._file[1])
            self._file = None

    def fill(self, tensor: Tensor, entry: Entry) -> None:
        """Fill the part of ``tensor`` that this rank holds; rows that the file lacks become zero.

        Args:
            tensor: Plain or a DTensor whose part is one box; any device and dtype.
            entry: What is on file. Its shape is the tensor's, but for the number of rows.

        Raises:
            ValueError: The file is shorter than its header says, or float16 too narrow for it.
            OSError: As reading raises.
        """
        local, offsets = shard_of(tensor)
        if local.ndim == 0:
            local, offsets = local.reshape(1), (0,)
        shape = entry.shape or (1,)
        rows = min(local.shape[0], max(0, shape[0] - offsets[0]))
        with torch.no_grad():
            local[rows:].zero_()
            self._fill(local[:rows], offsets, shape, entry, entry.start)
        if local.dtype == torch.float16 != entry.dtype and local.isinf().any():
            raise ValueError(f"{entry.key} has values that float16 can't hold; use bfloat16")

    def are_equal(self, entry: Entry, other: Entry, tensor: Tensor) -> bool:
        """Whether two entries of one shape have the same values where this rank holds ``tensor``."""
        local, offsets = shard_of(tensor)
        rows = min(local.shape[0], max(0, entry.shape[0] - offsets[0]))
        width = math.prod(local.shape[1:]) * 4
        step = max(1, BLOCK // max(1, width))
        for first in range(0, rows, step):
            shape = (min(step, rows - first), *local.shape[1:])
            at = (offsets[0] + first, *offsets[1:])
            parts = [torch.empty(shape, dtype=torch.float32) for _ in range(2)]
            for part, source in zip(parts, (entry, other)):
                self._fill(part, at, source.shape, source, source.start)
            if not torch.equal(*parts):
                return False
        return True

    def _fill(self, local: Tensor, offsets: Shape, shape: Shape, entry: Entry, start: int) -> None:
        """``shape``: of the tensor whose bytes begin at ``start``; ``local`` is a box in it."""
        if local.numel() == 0:
            return
        size = entry.dtype.itemsize
        row = math.prod(shape[1:])  # elements
        if tuple(local.shape[1:]) == shape[1:] and local.is_contiguous():
            self._fill_range(local.view(-1), entry, start + offsets[0] * row * size)
            return
        if row * size > BLOCK:
            for i, part in enumerate(local):
                at = start + (offsets[0] + i) * row * size
                self._fill(part, offsets[1:], shape[1:], entry, at)
            return
        inner = math.prod(shape[2:])
        piece = local.shape[1] * inner if tuple(local.shape[2:]) == shape[2:] else 0
        by_piece = piece * size >= _PIECE
        step = max(1, BLOCK // ((piece if by_piece else row) * size))
        for first in range(0, local.shape[0], step):
            part = local[first : first + step]
            at = start + (offsets[0] + first) * row * size
            if by_piece:
                at += offsets[1] * inner * size
                part.copy_(self._pieces(at, len(part), piece, row, entry).view(part.shape))
            else:
                rows = self._read(at, len(part) * row, entry).view(len(part), *shape[1:])
                box = tuple(slice(o, o + n) for o, n in zip(offsets[1:], local.shape[1:]))
                part.copy_(rows[(slice(None), *box)])

    def _fill_range(self, flat: Tensor, entry: Entry, start: int) -> None:
        step = BLOCK // entry.dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            part.copy_(self._read(start + first * entry.dtype.itemsize, part.numel(), entry))

    def _read(self, start: int, count: int, entry: Entry) -> Tensor:
        """``count`` elements that follow each other, in the file's dtype, until the next read."""
        view = self._space(count * entry.dtype.itemsize)
        self._read_into(view, start, entry.file)
        return torch.frombuffer(view, dtype=entry.dtype)

    def _pieces(self, start: int, count: int, piece: int, row: int, entry: Entry) -> Tensor:
        """``count`` times ``piece`` elements, one from each row."""
        size = entry.dtype.itemsize
        view = self._space(count * piece * size)
        for i in range(count):
            part = view[i * piece * size : (i + 1) * piece * size]
            self._read_into(part, start + i * row * size, entry.file)
        return torch.frombuffer(view, dtype=entry.dtype)

    def _space(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(max(size, BLOCK))
        return memoryview(self._buffer)[:size]

    def _read_into(self, view: memoryview, start: int, file: Path) -> None:
        descriptor = self._open(file)
        done = 0
        while done < len(view):  # one call stops at 2 GiB, or at a signal
            count = os.preadv(descriptor, [view[done:]], start + done)
            if count == 0:
                raise ValueError(f"{file} ends at byte {start + done}; was it changed meanwhile?")
            done += count
        self.bytes_read += done

    def _open(self, file: Path) -> int:
        if self._file is None or self._file[0] != file:
            self.__exit__(None, None, None)
            self._file = (file, os.open(file, os.O_RDONLY))
        return self._file[1]


def bytes_to_read(entry: Entry, tensor: Tensor) -> int:
    """The bytes of this rank's part on file; narrow columns cost more, as whole rows are read."""
    local, offsets = shard_of(tensor)
    if local.ndim == 0:
        return entry.dtype.itemsize
    rows = min(local.shape[0], max(0, entry.shape[0] - offsets[0]))
    return rows * math.prod(local.shape[1:]) * entry.dtype.itemsize
