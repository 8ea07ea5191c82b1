"""Decide which rank writes which box of which tensor, each byte once and evenly spread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ptx.ckpt._encode import dtype_name, dtype_of
from ptx.ckpt._parts import Spec
from ptx.ckpt._zip import ALIGN, frame

# Replicas share a box out in pieces of whole rows of about this size: even, and not too many.
SHARE_BYTES = 16 * 2**20

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class Held:
    """What a rank has of a tensor; ``box`` is None if that is nothing."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None


@dataclass(frozen=True)
class Piece:
    """A box that one rank writes. ``start``: of its values in the rank's file; ``end``: of its frame."""

    name: str
    dtype: str
    box: Box
    start: int = 0
    end: int = 0


@dataclass
class Plan:
    """Who writes what; pieces by rank."""

    tensors: dict[str, Spec]
    pieces: list[list[Piece]] = field(default_factory=list)


def signature(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Equal exactly if `held` is; cheap enough for every save."""
    return [
        (name, t.dtype, t.shape, t.device_mesh, t.placements)
        if isinstance(t, DTensor)
        else (name, t.dtype, t.shape)
        for name, t in tensors.items()
    ]


def held(tensors: Mapping[str, Tensor]) -> list[Held]:
    """What this rank has of each tensor.

    Raises:
        ValueError: A DTensor with a pending sum (Partial placement).
    """
    return [
        Held(name, dtype_name(t.dtype), tuple(t.shape), local_box(name, t))
        for name, t in tensors.items()
    ]


def local_box(name: str, tensor: Tensor) -> Box | None:
    """Where this rank's memory of a tensor lies in it; None if it is empty."""
    if not isinstance(tensor, DTensor):
        offsets, sizes = (0,) * tensor.ndim, tuple(tensor.shape)
    elif tensor.device_mesh.get_coordinate() is None:
        return None
    elif any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"save: {name!r} is a sum not yet taken, {tensor.placements}; redistribute it"
        )
    else:
        # What DCP asks, and right for every placement: strided (FSDP x TP), uneven, empty.
        chunk = tensor.__create_chunk_list__()[0]
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    return (offsets, sizes) if prod(sizes) else None


def plan(by_rank: Sequence[Iterable[Held]]) -> Plan:
    """Divide the tensors over the ranks that hold them, the same for the same input.

    Raises:
        ValueError: Ranks disagree on a tensor's shape or dtype, or together don't hold all of it.
    """
    tensors: dict[str, Spec] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    wrong = []
    for rank, items in enumerate(by_rank):
        for item in items:
            spec = Spec(dtype_of(item.dtype), item.shape)
            if tensors.setdefault(item.name, spec) != spec:
                first = tensors[item.name]
                wrong.append(
                    f"{item.name!r} is {first.dtype} {first.shape} on one rank, {spec.dtype} {spec.shape}"
                    f" on rank {rank}"
                )
            if item.box:
                holders.setdefault((item.name, item.box), []).append(rank)
    covered = dict.fromkeys(tensors, 0)
    for name, (_, sizes) in holders:
        covered[name] += prod(sizes)
    wrong += [
        f"{name!r} {spec.shape}: the ranks hold {covered[name]} different values of {prod(spec.shape)}"
        for name, spec in tensors.items()
        if covered[name] != prod(spec.shape)
    ]
    if wrong:
        raise ValueError("save: " + "; ".join(wrong[:8]))
    return Plan(tensors, _divide(tensors, holders, len(by_rank)))


def _divide(
    tensors: dict[str, Spec], holders: dict[tuple[str, Box], list[int]], ranks: int
) -> list[list[Piece]]:
    load = [0] * ranks
    chosen: list[list[tuple[int, str, Box]]] = [[] for _ in range(ranks)]
    order = {name: i for i, name in enumerate(tensors)}
    # What one rank alone can write comes first; the rest then evens it out, large boxes first.
    shares = [
        (len(where), -nbytes, order[name], box, where)
        for (name, box), where in holders.items()
        for box, nbytes in _shares(box, tensors[name].dtype.itemsize, len(where))
    ]
    names = list(tensors)
    for _, nbytes, number, box, where in sorted(shares):
        rank = min(where, key=lambda r: (load[r], r))
        load[rank] -= nbytes
        chosen[rank].append((number, names[number], box))
    return [_place(tensors, sorted(some)) for some in chosen]


def _shares(box: Box, itemsize: int, holders: int) -> list[tuple[Box, int]]:
    """The box, or blocks of its rows if several ranks hold it and it is large."""
    offsets, sizes = box
    nbytes = prod(sizes) * itemsize
    parts = min(holders, -(-nbytes // SHARE_BYTES), sizes[0] if sizes else 1)
    if parts <= 1:
        return [(box, nbytes)]
    edges = [sizes[0] * i // parts for i in range(parts + 1)]
    return [
        (
            ((offsets[0] + start, *offsets[1:]), (stop - start, *sizes[1:])),
            nbytes // sizes[0] * (stop - start),
        )
        for start, stop in pairwise(edges)
    ]


def _place(tensors: dict[str, Spec], chosen: list[tuple[int, str, Box]]) -> list[Piece]:
    """The pieces of one file, each in the frame that makes it a file of torch.save's."""
    pieces, at = [], 0
    for _, name, box in chosen:
        spec = tensors[name]
        head, tail = frame(spec.dtype, box[1])
        start = at + len(head)
        end = start + prod(box[1]) * spec.dtype.itemsize + len(tail)
        pieces.append(Piece(name, dtype_name(spec.dtype), box, start, end))
        at = -(-end // ALIGN) * ALIGN
    return pieces


def index_json(plan: Plan) -> bytes:
    """``{name: [dtype, shape, [[rank, start, offsets, sizes], ...]]}`` for the manifest."""
    chunks: dict[str, list[Any]] = {name: [] for name in plan.tensors}
    for rank, pieces in enumerate(plan.pieces):
        for piece in pieces:
            chunks[piece.name].append([rank, piece.start, *piece.box])
    index = {
        name: [dtype_name(spec.dtype), spec.shape, chunks[name]]
        for name, spec in plan.tensors.items()
    }
    return json.dumps(index, separators=(",", ":")).encode()


def mesh_of(tensors: Iterable[Tensor]) -> list[Any]:
    """This rank's place in the meshes that the tensors are on: (dim, size, coordinate), sizes above 1."""
    found = set()
    for mesh in {t.device_mesh for t in tensors if isinstance(t, DTensor)}:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        coordinate = mesh.get_coordinate() or ()
        found |= {(n, s, c) for n, s, c in zip(names, mesh.shape, coordinate) if s > 1}
    return sorted(map(list, found))
