"""Softmax statistics of a slice of the columns, and how those of all ranks become one loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

# Private, but the one collective that compiled code can run for any number of rows.
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

from ptx.loss._options import LossOptions, loss_dtype, shape_logits

# Elements of logits worked on at a time. On CPU a block and its temporaries should stay in the
# cache; elsewhere it has to be large against the launch of a kernel, and small against the logits.
CPU_BLOCK = 2**18
DEVICE_BLOCK = 2**25

# Rows of the exchanged statistics, per token and over this rank's columns; the entropy's is the last.
MAX, SUM_EXP, TARGET, SUM = range(4)
SUM_EXP_LOG = -1

# Where exp is 0 in float64 too: -inf would make exp(x) * x NaN.
DEEPEST = -1e4


def real_columns(ranks: int, vocab_size: int, padded_size: int) -> tuple[int, ...]:
    """How many of the first ``vocab_size`` of ``padded_size`` columns each rank has.

    In torch chunk order: ceil(padded_size / ranks) each, the last ranks fewer or none.
    """
    share = -(-padded_size // ranks)
    return tuple(min(max(vocab_size - rank * share, 0), share) for rank in range(ranks))


def new_stats(like: Tensor, tokens: int, options: LossOptions, entropy: bool = False) -> Tensor:
    """Zeros, [kinds, tokens]: 3 kinds, one more with label smoothing, one more for the entropy."""
    kinds = 3 + bool(options.label_smoothing) + entropy
    return like.new_zeros(kinds, tokens, dtype=loss_dtype(like.dtype))


def column_stats(
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    exps: Tensor | None = None,
    *,
    entropy: bool = False,
    most_rows: int | None = None,
) -> Tensor:
    """What the other ranks need to know of these columns, [kinds, N]; see `new_stats`.

    Args:
        logits: [N, C], C may be 0.
        target: [N], the column of the label; outside [0, C) where it isn't among them.
        options: As everywhere.
        exps: [N, C or more], filled with exp(x - m) if given.
        entropy: Whether the last kind is wanted.
        most_rows: See `row_blocks`.

    Returns:
        Per token the maximum m, sum(exp(x - m)), x of the target (0 if it isn't here), sum(x - m)
        for label smoothing, sum(exp(x - m) * (x - m)) for the entropy.
    """
    tokens, columns = logits.shape
    stats = new_stats(logits, tokens, options, entropy)
    if not columns:
        stats[MAX] = -torch.inf
        return stats
    target, owned = find_owned(target, columns)
    lowest = torch.finfo(stats.dtype).min  # where every column is -inf: -inf - -inf would be NaN
    for rows in row_blocks(logits, most_rows):
        x = shape_logits(logits[rows], options)
        top = torch.amax(x, dim=-1).clamp_(min=lowest)
        stats[MAX, rows] = top
        stats[TARGET, rows] = x.gather(1, target[rows, None])[:, 0]
        work = torch.sub(x, top[:, None], out=None if exps is None else exps[rows, :columns])
        if options.label_smoothing:
            stats[SUM, rows] = work.sum(dim=-1)
        logs = work.clamp(min=DEEPEST) if entropy else None
        stats[SUM_EXP, rows] = work.exp_().sum(dim=-1)
        if logs is not None:
            stats[SUM_EXP_LOG, rows] = logs.mul_(work).sum(dim=-1)
    stats[TARGET].masked_fill_(~owned, 0.0)
    return stats


def gather_stats(stats: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """[kinds, N] of every rank as [ranks, kinds, N]: the one collective; None: this rank alone."""
    if mesh is None or mesh.size() == 1:
        return stats[None]
    if torch.compiler.is_compiling():
        return all_gather_tensor(stats[None], 0, mesh.get_group())
    gathered = stats.new_empty(mesh.size(), *stats.shape)
    # By a list of views: torch renamed the variant that takes one tensor (deprecated in 2.13).
    dist.all_gather(list(gathered.unbind()), stats, group=mesh.get_group())
    return gathered


def merge_stats(
    stats: Tensor, classes: tuple[int, ...], options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Over all columns, per token: the maximum, the sum of exp(x - maximum), the loss; each [N].

    lse = maximum + log(sum), kept apart as float32 can't hold a small log beside a large maximum.
    """
    top = stats[:, MAX].amax(dim=0)
    shift = stats[:, MAX] - top  # [ranks, N], <= 0
    total = (stats[:, SUM_EXP] * shift.exp()).sum(dim=0)
    log_total = total.log()
    losses = log_total - (stats[:, TARGET].sum(dim=0) - top)
    if eps := options.label_smoothing:
        # sum(x - top), from every rank's sum(x - its own maximum); an empty shard's is -inf
        holders = [rank for rank, columns in enumerate(classes) if columns]
        centred = sum(stats[r, SUM] + classes[r] * shift[r] for r in holders)
        losses = (1 - eps) * losses + eps * (log_total - centred / sum(classes))
    if options.z_loss:
        losses = losses + options.z_loss * (top + log_total).square()
    return top, total, losses


def merge_entropy(stats: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """[N], in nats and over all columns: log(total) - E[x - top]; see `merge_stats`."""
    # An empty shard's maximum is -inf, and its sums are 0.
    shift = (stats[:, MAX] - top).clamp(min=DEEPEST)
    logs = (stats[:, SUM_EXP_LOG] + shift * stats[:, SUM_EXP]) * shift.exp()
    return total.log() - logs.sum(dim=0) / total


def find_owned(target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """``target`` moved into [0, columns), and whether it was there."""
    owned = (target >= 0) & (target < columns)
    return target.clamp(0, max(columns - 1, 0)), owned


def row_blocks(logits: Tensor, most_rows: int | None = None) -> Iterable[slice]:
    """Slices of the rows to work on one after the other, of ``most_rows`` at most."""
    if torch.compiler.is_compiling():  # it fuses the passes itself; a loop would fix the shape
        return (slice(None),)
    tokens, columns = logits.shape
    block = CPU_BLOCK if logits.device.type == "cpu" else DEVICE_BLOCK
    rows = max(1, block // max(columns, 1))
    if most_rows is not None:
        rows = min(rows, most_rows)
    return (slice(start, start + rows) for start in range(0, tokens, rows))
