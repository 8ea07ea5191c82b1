"""Logits as they come out of a model, plain or a DTensor, with the labels beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptx.loss._arguments import require_tensors, size_errors
from ptx.loss._column_stats import real_columns
from ptx.loss._labels import flat_labels, require_classes


class FlatLogits(NamedTuple):
    """What this rank has of them.

    Attributes:
        logits: [N, C], this rank's columns.
        labels: [N] int64, global ids.
        mesh: The ranks that share the columns; None: this one has all of them.
        vocab_size: The number of real classes.
        padded_size: The columns of all ranks.
        shape: The labels' own.
    """

    logits: Tensor
    labels: Tensor
    mesh: DeviceMesh | None
    vocab_size: int
    padded_size: int
    shape: torch.Size


def flat_logits(
    logits: Tensor, labels: Tensor, vocab_size: int | None, ignore_index: int, where: str
) -> FlatLogits:
    """Check and flatten.

    Raises:
        ValueError: A label out of range, shapes that disagree, a sharding other than over the last
            dim and a 1-D mesh.
    """
    require_tensors(where, logits=logits, labels=labels)
    columns = logits.shape[-1] if logits.ndim else 0
    classes = columns if vocab_size is None else vocab_size
    if not logits.is_floating_point() or size_errors("vocab_size", classes, columns):
        raise ValueError(
            f"{where}: logits {tuple(logits.shape)} of {logits.dtype} must be floating point, with"
            f" a column for each class (vocab_size={vocab_size}) as their last dim"
        )
    shape, mesh = logits.shape[:-1], None
    if isinstance(logits, DTensor):
        mesh = None if _is_whole(logits, where) else logits.device_mesh
        logits = logits.to_local()
        if mesh is not None:
            require_share(logits.shape[-1], columns, mesh, "columns of the logits", where)
    target = flat_labels(labels, shape, where)
    require_classes(target, classes, ignore_index, where)
    # Not -1 for the rows: a rank may hold no column at all.
    flat = logits.reshape(target.numel(), logits.shape[-1])
    return FlatLogits(flat, target, mesh, classes, columns, shape)


def require_share(local: int, total: int, mesh: DeviceMesh, what: str, where: str) -> None:
    """Refuse a DTensor that isn't split in torch chunk order, as ``from_local`` may make one."""
    share = real_columns(mesh.size(), total, total)[mesh.get_local_rank()]
    if local != share:
        raise ValueError(
            f"{where}: this rank has {local} {what}, but its share of {total} over"
            f" {mesh.size()} ranks is {share}; use distribute_tensor, which splits in torch chunk"
            " order"
        )


def shards_columns(logits: DTensor) -> bool:
    """Whether the last dim is sharded over the first mesh dim, in plain chunk order."""
    placement = logits.placements[0]
    # By type: a strided shard has its columns in another order, and is a subclass in some versions.
    return type(placement) is Shard and placement.dim in (-1, logits.ndim - 1)


def _is_whole(logits: DTensor, where: str) -> bool:
    """Whether this rank has every column; if not it has its share, anything else raises."""
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.size() == 1 or all(isinstance(placement, Replicate) for placement in placements):
        return True
    if mesh.ndim == 1 and shards_columns(logits):
        return False
    raise ValueError(
        f"{where}: logits are a DTensor with placements {placements} on a {mesh.ndim}-D mesh; it"
        " takes Replicate(), or Shard(-1) on the 1-D tp mesh:"
        " logits.redistribute(tp_mesh, [Shard(-1)])"
    )
