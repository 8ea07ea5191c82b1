"""Read a step's bytes: what this rank needs of them, verified first, then copied into tensors."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
import xxhash
from torch import Tensor

from ptx.ckpt import _disk
from ptx.ckpt._layout import Box, local_box
from ptx.ckpt._match import Match
from ptx.ckpt._parts import Spec, local_part
from ptx.ckpt._step import Chunk, Step

MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap doesn't name it


@dataclass(frozen=True)
class Copy:
    """One overlap of a saved box with this rank's memory."""

    name: str
    chunk: Chunk
    source: tuple[slice, ...]  # within the saved box
    target: tuple[slice, ...]  # within the local memory


def copies(step: Step, matches: Iterable[Match]) -> list[Copy]:
    """What this rank reads.

    Raises:
        RuntimeError: The step doesn't hold all of what it says it holds.
    """
    found = []
    for each in matches:
        for name, tensor in each.targets.items():
            if (box := local_box(name, tensor)) is None:
                continue
            values = 0
            for chunk in step.chunks[name]:
                if overlap := _overlap(chunk.box, box):
                    found.append(Copy(name, chunk, *overlap))
                    values += prod(part.stop - part.start for part in found[-1].target)
            if values != prod(box[1]):
                raise RuntimeError(
                    f"load: {step.folder} holds {values} of {prod(box[1])} values of {name!r}"
                )
    return found


def _overlap(saved: Box, local: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    source, target = [], []
    for a, n, b, m in zip(saved[0], saved[1], local[0], local[1]):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        source.append(slice(start - a, stop - a))
        target.append(slice(start - b, stop - b))
    return tuple(source), tuple(target)


class Files:
    """A step's data files, mapped where they lie in the page cache.

    Hashing and copying from there spares a copy, and memory. A page that can't be read would end
    the process (SIGBUS), so each is made readable first by a call that reports instead.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._bytes: dict[str, Tensor] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def bytes_of(self, name: str) -> Tensor:
        """Of a file, as uint8; read-only."""
        if name not in self._bytes:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._bytes[name] = torch.frombuffer(self._map(name), dtype=torch.uint8)
        return self._bytes[name]

    def close(self) -> None:
        """Forget the files; maps that tensors still use go with them."""
        self._bytes.clear()
        self._maps.clear()

    def check(self, name: str, chunks: list[int]) -> None:
        """Compare chunks with their checksums; raises `DamagedError`."""
        entry = self.step.files[name]
        try:
            mapped = self._map(name)
            if len(mapped) != entry["bytes"]:
                raise OSError("another size")
            for chunk in chunks:
                start = chunk * _disk.CHUNK_BYTES
                stop = min(start + _disk.CHUNK_BYTES, len(mapped))
                mapped.madvise(MADV_POPULATE_READ, start, stop - start)
                with memoryview(mapped) as view, view[start:stop] as part:
                    if xxhash.xxh3_64_hexdigest(part) != entry["xxh3_64"][chunk]:
                        raise OSError("another checksum")
        except (OSError, ValueError):
            # Also for kernels before 5.14, which can't populate, and empty files, which can't be
            # mapped. Read in the plain way, it is whole after all, or says what is wrong.
            _disk.check_chunks(self.step.folder, entry, chunks)

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            fd = self._open(name)
            try:
                self._maps[name] = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(fd)
        return self._maps[name]

    def _open(self, name: str) -> int:
        return _disk.open_plain(os.path.join(self.step.folder, name))


def verify_share(files: Files, reads: Iterable[Copy], rank: int, world_size: int) -> list[str]:
    """Verify this rank's share of all files, and all that it is about to read; returns the damage.

    Cost: on the same mesh each rank reads its own file once.
    """
    step = files.step
    wanted: dict[str, set[int]] = {}
    for i, (name, entry) in enumerate(step.files.items()):
        wanted[name] = set(range(len(entry["xxh3_64"]))) if i % world_size == rank else set()
    for read in reads:
        first, last = _extent(read, step.tensors[read.name])
        chunks = range(first // _disk.CHUNK_BYTES, last // _disk.CHUNK_BYTES + 1)
        wanted[_disk.data_file(read.chunk.rank)].update(chunks)
    damage = []
    for name, some in wanted.items():
        if some:
            try:
                files.check(name, sorted(some))
            except _disk.DamagedError as error:
                damage.append(str(error))
    return damage


def _extent(read: Copy, spec: Spec) -> tuple[int, int]:
    """First and last byte of the file that a copy reads from."""
    first = last = 0
    for part, size in zip(read.source, read.chunk.box[1]):
        first = first * size + part.start
        last = last * size + part.stop - 1
    start, itemsize = read.chunk.start, spec.dtype.itemsize
    return start + first * itemsize, start + (last + 1) * itemsize - 1


@torch.no_grad()
def fill(files: Files, matches: Iterable[Match], reads: Iterable[Copy]) -> None:
    """Copy verified bytes into the tensors."""
    targets = {name: local_part(t) for each in matches for name, t in each.targets.items()}
    for read in reads:
        spec, sizes = files.step.tensors[read.name], read.chunk.box[1]
        stop = read.chunk.start + prod(sizes) * spec.dtype.itemsize
        data = files.bytes_of(_disk.data_file(read.chunk.rank))[read.chunk.start : stop]
        source, target = data.view(spec.dtype).view(sizes), targets[read.name]
        whole = tuple(slice(0, size) for size in sizes)
        if read.source == read.target == whole and target.shape == source.shape:  # the usual case
            target.copy_(source)
        else:
            target[read.target].copy_(source[read.source])
