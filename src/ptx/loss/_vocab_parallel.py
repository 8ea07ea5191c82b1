"""Cross-entropy of logits whose columns are split over ranks, in one small collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ptx.loss._labels import flat_labels, require_classes
from ptx.loss._options import LossOptions, Reduction, loss_dtype, reduce_tokens, shape_logits

# Elements of logits worked on at a time. On CPU a block and its temporaries should stay in the cache; elsewhere
# the block only has to be large against the launch of a kernel, and small against the logits.
CPU_BLOCK = 2**18
DEVICE_BLOCK = 2**25

# Rows of the exchanged statistics, per token and over this rank's columns.
MAX, SUM_EXP, TARGET, SUM = range(4)


def vocab_parallel_ce(
    logits: Tensor,
    labels: Tensor,
    mesh: DeviceMesh,
    *,
    vocab_size: int,
    padded_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy from each rank's slice of the logits, without gathering them.

    Args:
        logits: [..., V_local], any float dtype. This rank's columns, in torch chunk order (ceil(V / ranks)
            columns each, the last ranks fewer or none); or a DTensor ``Shard(-1)`` over ``mesh``.
        labels: [...], any integer dtype: global ids in [0, V) or ``ignore_index``. Plain, or a replicated
            DTensor; equal on every rank.
        mesh: 1-D mesh the vocabulary is split over, e.g. ``mesh["tp"]``.
        vocab_size: V, the number of real classes.
        padded_size: Columns summed over ranks, if the vocabulary is padded; the last
            ``padded_size - vocab_size`` get no probability and no gradient.
        ignore_index: Label whose positions add neither loss nor gradient.
        reduction: "mean" divides by the number of kept labels; "sum" doesn't divide; "none" gives [...].
        label_smoothing: Share of the target that is spread over all V classes (torch's convention).
        z_loss: Weight of lse**2, reduced like the cross-entropy.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first; 1 / temperature.

    Returns:
        Plain float32 loss (float64 for float64 logits), bit-equal on every rank; ``backward`` gives the
        gradient of this rank's columns.

    Raises:
        ValueError: A label out of range (on accelerators: a device-side assertion, without a sync), shapes
            that disagree, V_local that isn't this rank's share, an option out of its range. Labels are
            equal on every rank, so all ranks raise together, before any collective.

    Cost: forward one all-gather of [3, N] float32 (N labels; [4, N] with label_smoothing), backward none.
    Keeps the logits for the backward and nothing else of their size; the only large allocation is their
    gradient, in their dtype.

    Source: Megatron-LM, arXiv:1909.08053, section 3 (parallel cross-entropy); partial softmaxes are merged as
    in online softmax, arXiv:1805.02867.
    """
    where = "vocab_parallel_ce"
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(where)
    columns = vocab_size if padded_size is None else padded_size
    logits = _local_logits(logits, mesh, vocab_size, columns)
    shape = logits.shape[:-1]
    target = flat_labels(labels, shape, where)
    require_classes(target, vocab_size, ignore_index, where)
    # Not -1 for the rows: a rank may hold no column at all.
    flat = logits.reshape(target.numel(), logits.shape[-1])
    loss = sharded_ce(flat, target, mesh, vocab_size, columns, options)
    return loss.reshape(shape) if reduction == "none" else loss


def sharded_ce(
    logits: Tensor,
    labels: Tensor,
    mesh: DeviceMesh,
    vocab_size: int,
    padded_size: int,
    options: LossOptions,
) -> Tensor:
    """`vocab_parallel_ce` on checked inputs: logits [N, V_local], labels [N] int64."""
    classes = real_columns(mesh.size(), vocab_size, padded_size)
    losses = _VocabParallelCE.apply(logits, labels, mesh, classes, options)
    assert isinstance(losses, Tensor)
    return reduce_tokens(losses, labels, options)


def real_columns(ranks: int, vocab_size: int, padded_size: int) -> tuple[int, ...]:
    """How many of the first ``vocab_size`` of ``padded_size`` columns each rank has, in torch chunk order."""
    share = -(-padded_size // ranks)
    return tuple(min(max(vocab_size - rank * share, 0), share) for rank in range(ranks))


class _VocabParallelCE(torch.autograd.Function):
    """Loss per token [N]; the reduction is left to autograd, so any gradient may come in, any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mesh: DeviceMesh,
        classes: tuple[int, ...],
        options: LossOptions,
    ) -> Tensor:
        rank = mesh.get_local_rank()
        first, mine = sum(classes[:rank]), classes[rank]
        stats = column_stats(logits[:, :mine], labels - first, options)
        top, total, losses = merge_stats(gather_stats(stats, mesh), classes, options)
        ignored = labels == options.ignore_index
        ctx.save_for_backward(logits, labels, top, total)
        ctx.first, ctx.mine, ctx.vocab_size, ctx.options = first, mine, sum(classes), options
        return losses.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, top, total = ctx.saved_tensors
        options: LossOptions = ctx.options
        grad = grad.masked_fill(labels == options.ignore_index, 0.0) * options.logit_scale
        # d loss / d x = p * on_softmax - [column == label] * on_target - on_all
        on_softmax = grad / total
        if options.z_loss:
            on_softmax = on_softmax * (1 + 2 * options.z_loss * (top + total.log()))
        on_target = grad * (1 - options.label_smoothing)
        on_all = grad * (options.label_smoothing / ctx.vocab_size)
        target, owned = _owned(labels - ctx.first, ctx.mine)
        on_target = on_target.masked_fill(~owned, 0.0)

        out = torch.empty_like(logits)
        out[:, ctx.mine :] = 0.0
        for rows in _row_blocks(logits) if ctx.mine else ():
            x = shape_logits(logits[rows, : ctx.mine], options)
            work = torch.sub(x, top[rows, None]).exp_().mul_(on_softmax[rows, None])
            work.scatter_add_(1, target[rows, None], -on_target[rows, None])
            if options.label_smoothing:
                work.sub_(on_all[rows, None])
            if options.softcap is not None:
                work.mul_(1 - (x / options.softcap).square())
            out[rows, : ctx.mine] = work  # rounded once, after everything is summed
        return out, None, None, None, None


def column_stats(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """What the other ranks need to know of these columns: [3, N], or [4, N] with label smoothing.

    Args:
        logits: [N, C], C may be 0.
        target: [N], the column of the label; outside [0, C) where it isn't among them.
        options: As everywhere.

    Returns:
        Per token the maximum m, sum(exp(x - m)), x of the target (0 if it isn't here), sum(x - m).
    """
    tokens, columns = logits.shape
    kinds = 4 if options.label_smoothing else 3
    stats = logits.new_zeros(kinds, tokens, dtype=loss_dtype(logits.dtype))
    if not columns:
        stats[MAX] = -torch.inf
        return stats
    target, owned = _owned(target, columns)
    lowest = torch.finfo(stats.dtype).min  # where every column is -inf: -inf - -inf would be NaN
    for rows in _row_blocks(logits):
        x = shape_logits(logits[rows], options)
        top = torch.amax(x, dim=-1).clamp_(min=lowest)
        stats[MAX, rows] = top
        stats[TARGET, rows] = x.gather(1, target[rows, None])[:, 0]
        work = torch.sub(x, top[:, None])
        if options.label_smoothing:
            stats[SUM, rows] = work.sum(dim=-1)
        stats[SUM_EXP, rows] = work.exp_().sum(dim=-1)
    stats[TARGET].masked_fill_(~owned, 0.0)
    return stats


def gather_stats(stats: Tensor, mesh: DeviceMesh) -> Tensor:
    """[kinds, N] of every rank as [ranks, kinds, N]: the one collective."""
    ranks = mesh.size()
    if ranks == 1:
        return stats[None]
    gathered = stats.new_empty(ranks * stats.shape[0], stats.shape[1])
    dist.all_gather_into_tensor(gathered, stats, group=mesh.get_group())
    return gathered.unflatten(0, (ranks, stats.shape[0]))


def merge_stats(
    stats: Tensor, classes: tuple[int, ...], options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum, the sum of exp(x - maximum), and the loss per token, over all columns; each [N].

    lse = maximum + log(sum). They are kept apart, as float32 can't hold a small log beside a large maximum.
    """
    holders = [rank for rank, columns in enumerate(classes) if columns]  # always the first ones
    stats = stats[: len(holders)]
    top = stats[:, MAX].amax(dim=0)
    shift = stats[:, MAX] - top  # [ranks, N], <= 0
    total = (stats[:, SUM_EXP] * shift.exp()).sum(dim=0)
    log_total = total.log()
    losses = log_total - (stats[:, TARGET].sum(dim=0) - top)
    if eps := options.label_smoothing:
        # sum(x - top), from every rank's sum(x - its own maximum)
        centred = sum(stats[r, SUM] + classes[r] * shift[r] for r in holders)
        losses = (1 - eps) * losses + eps * (log_total - centred / sum(classes))
    if options.z_loss:
        losses = losses + options.z_loss * (top + log_total).square()
    return top, total, losses


def _local_logits(logits: Tensor, mesh: DeviceMesh, vocab_size: int, columns: int) -> Tensor:
    where, wrong = "vocab_parallel_ce", []
    if isinstance(logits, DTensor):
        placement = logits.placements[0]
        if logits.device_mesh != mesh or type(placement) is not Shard or placement.dim != logits.ndim - 1:
            raise ValueError(
                f"{where}: logits are a DTensor with placements {logits.placements} over"
                f" {logits.device_mesh}; they must be Shard(-1) over {mesh}, or this rank's plain columns"
            )
        logits = logits.to_local()
    if not logits.is_floating_point():
        wrong.append(f"logits are {logits.dtype}, they must be floating point")
    if not 0 < vocab_size <= columns:
        wrong.append(f"vocab_size={vocab_size} must be in [1, padded_size={columns}]")
    if mesh.ndim != 1:
        wrong.append(f"the mesh has dims {mesh.mesh_dim_names}, it must be 1-D: pass mesh['tp']")
    else:
        share = real_columns(mesh.size(), columns, columns)[mesh.get_local_rank()]
        if logits.ndim == 0 or logits.shape[-1] != share:
            wrong.append(
                f"logits {tuple(logits.shape)} must have {share} columns on this rank, its share of {columns}"
                f" over {mesh.size()} ranks in torch chunk order; say padded_size if the vocabulary is padded"
            )
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")
    return logits


def _owned(target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """``target`` moved into [0, columns), and whether it was there."""
    owned = (target >= 0) & (target < columns)
    return target.clamp(0, max(columns - 1, 0)), owned


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    tokens, columns = logits.shape
    rows = tokens
    if not torch.compiler.is_compiling():  # a compiler fuses the passes itself, and should not unroll
        block = CPU_BLOCK if logits.device.type == "cpu" else DEVICE_BLOCK
        rows = max(1, block // columns)
    return (slice(start, start + rows) for start in range(0, tokens, max(rows, 1)))
