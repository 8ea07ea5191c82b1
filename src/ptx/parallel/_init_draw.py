"""Fill a rank's part of a tensor with values that depend on the whole tensor, not on the part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_256

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Most elements of one random stream, and held at once (1 MiB in fp32). Part of the contract:
# with another number the same seed gives other weights.
BLOCK = 2**18

Index = tuple[int, ...]
Fill = Callable[[Tensor, torch.Generator], object]
# torch's Mersenne Twister: 32-bit words of state, and where they begin in the bytes of a state.
_STATE_WORDS, _STATE_START, _STATE_BYTES = 624, 24, 5056


@dataclass(frozen=True)
class Region:
    """A box in a full tensor, and the order in which a view of it lists the dims.

    Args:
        start: First index in each dim of the full tensor.
        size: Length in each dim of the full tensor.
        order: The dims longer than 1, in the order that the view has them.
    """

    start: Index
    size: Index
    order: Index


def region_of(view: Tensor, shape: Index) -> Region | None:
    """Which box of a contiguous tensor of this shape a view of it is; None: it isn't one."""
    strides = _contiguous_strides(shape)
    start, rest = [], view.storage_offset()
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    size, order = [1] * len(shape), []
    for length, stride in zip(view.shape, view.stride()):
        if length == 1:
            continue
        dims = [
            d for d, n in enumerate(shape) if n != 1 and strides[d] == stride and d not in order
        ]
        if not dims or start[dims[0]] + length > shape[dims[0]]:
            return None
        size[dims[0]] = length
        order.append(dims[0])
    return Region(tuple(start), tuple(size), tuple(order))


def shard_of(tensor: Tensor) -> tuple[Tensor, Index]:
    """This rank's part of a tensor, writable, and the index in the full tensor where it begins."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    with torch.no_grad():
        local = tensor.to_local()
    # Nothing public gives a shard's offsets (torch 2.13); this is what torch's checkpoints use.
    chunks = tensor.__create_chunk_list__()
    assert len(chunks) == 1, f"{len(chunks)} chunks"
    return local, tuple(chunks[0].offsets) or (0,) * tensor.ndim


def shard_problem(tensor: Tensor) -> str | None:
    """Why `shard_of` can't describe this tensor; None: it can."""
    if not isinstance(tensor, DTensor):
        return None
    if any(p.is_partial() for p in tensor.placements):
        return f"placements {tensor.placements} hold a sum that was not reduced"
    for dim in range(tensor.ndim):
        if not _is_one_box(dim, tensor.placements, tensor.device_mesh.shape):
            return f"placements {tensor.placements} put separate rows on one rank"
    return None


def draw(
    local: Tensor, offsets: Index, *, region: Region, fill: Fill, key: tuple[int, str, int]
) -> None:
    """Fill what ``local`` has of ``region``; an element gets the same value in any shard.

    Every block of the region that the shard touches is drawn whole, on CPU, in fp32, from a stream
    of its own, and what is here of it is cast and copied.

    Args:
        local: This rank's part of the full tensor, any device and dtype.
        offsets: Where it begins.
        region: What to fill.
        fill: Fills a block with a generator.
        key: (seed, name, number of the draw).
    """
    dtype = torch.float32 if local.is_floating_point() else local.dtype
    by_dim = sorted(range(len(region.order)), key=lambda i: region.order[i])
    if (parts := _overlap(local, offsets, region)) is None:
        return
    shape = tuple(region.size[d] for d in region.order)
    for number, start, size in _blocks(shape, [parts[1][d] for d in region.order]):
        place, extent = list(region.start), [1] * len(region.start)
        for at, length, dim in zip(start, size, region.order):
            place[dim] += at
            extent[dim] = length
        box = Region(tuple(place), tuple(extent), ())
        if (parts := _overlap(local, offsets, box)) is None:
            continue
        block = torch.empty(size, dtype=dtype, device="cpu")
        fill(block, _generator((*key, number)))
        here, there = parts
        local[here].copy_(block.permute(by_dim).reshape(extent)[there])


def copy(local: Tensor, offsets: Index, *, region: Region, source: Tensor) -> None:
    """Copy into ``local`` what it has of ``region``; ``source`` has the shape of the view."""
    by_dim = sorted(range(len(region.order)), key=lambda i: region.order[i])
    if (parts := _overlap(local, offsets, region)) is not None:
        here, there = parts
        source = source.reshape([region.size[d] for d in region.order]).permute(by_dim)
        local[here].copy_(source.reshape(region.size)[there])


def write(local: Tensor, offsets: Index, *, region: Region, op: Callable[[Tensor], object]) -> None:
    """Apply an elementwise in-place op to what ``local`` has of ``region``."""
    if (parts := _overlap(local, offsets, region)) is not None:
        op(local[parts[0]])


def eye(local: Tensor, offsets: Index) -> None:
    """Write into ``local`` what it has of the identity matrix."""
    local.zero_()
    ends = [start + length for start, length in zip(offsets, local.shape)]
    ones = torch.arange(max(offsets), max(*offsets, min(ends)), device=local.device)
    local[ones - offsets[0], ones - offsets[1]] = 1


def trunc_normal(
    block: Tensor, generator: torch.Generator, *, mean: float, std: float, a: float, b: float
) -> None:
    """Normal draws between ``a`` and ``b``, by the inverse of the distribution function.

    One draw for an element; torch redraws over the whole tensor until nothing is outside.
    """
    low, high = trunc_normal_limits(mean, std, a, b)
    # Far from the mean fp32 has too few numbers left between -1 and 1.
    wide = block if low <= 0 <= high else block.double()
    wide.uniform_(low, high, generator=generator)
    # uniform_ can return its lower limit; at -1 that would be an outlier as far away as ``a``.
    inside = 1 - torch.finfo(wide.dtype).eps / 2
    wide.clamp_(-inside, inside).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)
    if wide is not block:
        block.copy_(wide)


def trunc_normal_limits(mean: float, std: float, a: float, b: float) -> tuple[float, float]:
    """The standardised bounds through erf; raises ValueError if float64 sees nothing between."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    if not low < high:
        raise ValueError(
            f"materialize: trunc_normal_(mean={mean}, std={std}, a={a}, b={b}) has no probability"
            " between a and b; move the bounds towards the mean"
        )
    return low, high


def _blocks(shape: Index, near: Sequence[slice]) -> Iterator[tuple[int, Index, Index]]:
    """(number, start, size) of the boxes of at most BLOCK elements that make up a tensor.

    Only those that may touch the box ``near``: a rank of thousands has few of them.
    """
    if not shape:
        yield 0, (), ()
        return
    rows = _rows_of_a_block(shape)
    if rows == 0:
        inner = _number_of_blocks(shape[1:])
        for i in range(near[0].start, near[0].stop):
            for number, start, size in _blocks(shape[1:], near[1:]):
                yield i * inner + number, (i, *start), (1, *size)
        return
    for number in range(near[0].start // rows, -(-near[0].stop // rows)):
        first = number * rows
        length = min(rows, shape[0] - first)
        yield number, (first, *[0] * len(shape[1:])), (length, *shape[1:])


def _number_of_blocks(shape: Index) -> int:
    rows = _rows_of_a_block(shape)
    return -(-shape[0] // rows) if rows else shape[0] * _number_of_blocks(shape[1:])


def _rows_of_a_block(shape: Index) -> int:
    """Rows of the first dim in one block; 0: a row is split into several."""
    return BLOCK // math.prod(shape[1:])


def _overlap(
    local: Tensor, offsets: Index, box: Region
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a shard and a box meet, as slices of the one and of the other; None: nowhere."""
    here, there = [], []
    for offset, length, start, size in zip(offsets, local.shape, box.start, box.size):
        low, high = max(offset, start), min(offset + length, start + size)
        if low >= high:
            return None
        here.append(slice(low - offset, high - offset))
        there.append(slice(low - start, high - start))
    return tuple(here), tuple(there)


def _generator(key: tuple[int, str, int, int]) -> torch.Generator:
    # Not by manual_seed: torch's CPU generator uses 32 bits of it (2.13), so that of the 3e5 blocks
    # of a 70B model some ten pairs would be equal. A hash sets the whole state instead.
    generator = torch.Generator()
    state = generator.get_state()
    assert len(state) == _STATE_BYTES, "torch changed the layout of its generator's state"
    digest = shake_256(repr(key).encode()).digest(4 * _STATE_WORDS)
    words = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    state[_STATE_START : _STATE_START + 8 * _STATE_WORDS] = words.view(torch.uint8)
    generator.set_state(state)
    return generator


def _is_one_box(dim: int, placements: tuple[Placement, ...], mesh_shape: Index) -> bool:
    # FSDP over TP on one dim shards each TP shard again: a _StridedShard, whose factor is the ranks
    # of the mesh dims that follow. That is one range of rows; other uses interleave rows.
    factors, after = [], 1
    for placement, ranks in reversed(list(zip(placements, mesh_shape))):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            factors.append(placement.split_factor == after)
            after *= ranks
        elif isinstance(placement, Shard) and placement.dim == dim:
            if factors:  # left of a strided one: sharded first, then interleaved
                return False
            after *= ranks
    return all(factors)


def _contiguous_strides(shape: Index) -> Index:
    return tuple(max(math.prod(shape[d + 1 :]), 1) for d in range(len(shape)))
