"""Shared buffers that a save is copied into: allocated once, and laid out as the file to write."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptx.ckpt._encode import dtype_of
from ptx.ckpt._layout import Box, Piece
from ptx.ckpt._parts import local_part
from ptx.ckpt._zip import frame

ROOM_BYTES = 2**20  # slots grow by multiples of this, so that a longer meta needs no new one


@dataclass
class Layout:
    """What this rank writes, as long as the state keeps its shapes.

    Attributes:
        signature: Of the tensors, by `_layout.signature`.
        pieces: In file order.
        boxes: This rank's memory of each tensor.
        index: Rank 0's: the tensors of all ranks, for the manifest.
        dcp: Rank 0's: DCP's metadata.
    """

    signature: list[Any]
    pieces: list[Piece]
    boxes: dict[str, Box | None]
    index: bytes = b""
    dcp: bytes = b""

    @property
    def data_bytes(self) -> int:
        return self.pieces[-1].end if self.pieces else 0


class Slot:
    """One buffer, backed by a memfd that the writer maps as well; pinned if there is CUDA."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ptx-slot")
        self.size = 0
        self.layout: Layout | None = None
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[tuple[str, tuple[slice, ...] | None, Tensor]] = []
        self._pinned = False

    @torch.inference_mode(False)  # these tensors are written outside of it as well
    def lay_out(self, layout: Layout, sections: int) -> None:
        """Make room for the layout and ``sections`` bytes behind it; does nothing if there is.

        Cost: the first time, the allocation of all its memory, each page touched.
        """
        needed = layout.data_bytes + sections
        if needed > self.size:
            self._resize(-(-(needed + ROOM_BYTES // 2) // ROOM_BYTES) * ROOM_BYTES)
            self.layout = None
        if layout is self.layout:
            return
        at, self._views = 0, []
        for piece in layout.pieces:
            dtype, (_, sizes) = dtype_of(piece.dtype), piece.box
            head, tail = frame(dtype, sizes)
            self.put(piece.start - len(head), head)
            stop = piece.end - len(tail)
            self.put(at, bytes(piece.start - len(head) - at))
            self.put(stop, tail)
            at = piece.end
            view = self._bytes[piece.start : stop].view(dtype).view(sizes)
            box = layout.boxes[piece.name]
            assert box is not None
            self._views.append((piece.name, _within(piece.box, box), view))
        self.layout = layout

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces, and wait for the device."""
        on_device = False
        for name, slices, view in self._views:
            local = local_part(tensors[name])
            on_device |= local.device.type != "cpu"
            view.copy_(local if slices is None else local[slices], non_blocking=True)
        if on_device:
            torch.accelerator.synchronize()

    def put(self, start: int, data: bytes) -> None:
        assert self._map is not None
        self._map[start : start + len(data)] = data

    def free(self) -> None:
        self._unmap()
        os.close(self.fd)
        self.fd = -1

    def _resize(self, size: int) -> None:
        self._unmap()
        os.ftruncate(self.fd, 0)
        os.posix_fallocate(
            self.fd, 0, size
        )  # raises if there is no memory, where a fault would kill
        self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # Forks of the trainer (loader workers) would keep the memory, and pay for its page tables.
        self._map.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            pointer = self._bytes.data_ptr()
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(pointer, size, 0)) == 0
        self.size = size

    def _unmap(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False
        self._views, self.layout, self.size = [], None, 0
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view that someone still holds frees it later
                self._map.close()
            self._map = None


def _within(box: Box, outer: Box) -> tuple[slice, ...] | None:
    """Where ``box`` is in the memory of ``outer``; None if it is all of it."""
    if box == outer:
        return None
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(box[0], box[1], outer[0]))
