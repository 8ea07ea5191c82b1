"""Cross-entropy of logits whose columns are split over ranks, in one small collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ptx.loss._column_stats import (
    MAX,
    column_stats,
    find_owned,
    gather_stats,
    merge_stats,
    real_columns,
    row_blocks,
)
from ptx.loss._labels import flat_labels, require_classes
from ptx.loss._options import LossOptions, Reduction, loss_dtype, reduce_tokens, shape_logits


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
        logits: [..., V_local], any float dtype. This rank's columns, in torch chunk order
            (ceil(V / ranks) each, the last ranks fewer or none); or a DTensor ``Shard(-1)`` over
            ``mesh``.
        labels: [...], any integer dtype: global ids in [0, V) or ``ignore_index``. Plain, or a
            replicated DTensor; equal on every rank.
        mesh: 1-D mesh the vocabulary is split over, e.g. ``mesh["tp"]``.
        vocab_size: V, the number of real classes.
        padded_size: Columns summed over ranks, if the vocabulary is padded; the last
            ``padded_size - vocab_size`` get no probability and no gradient.
        ignore_index: Label whose positions add neither loss nor gradient.
        reduction: "mean" divides by the number of kept labels; "sum" doesn't divide; "none" gives
            [...], 0 where ignored.
        label_smoothing: Share of the target that is spread over all V classes (torch's convention).
        z_loss: Weight of lse**2, reduced like the cross-entropy.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first; 1 / temperature.

    Returns:
        Plain float32 loss (float64 for float64 logits), bit-equal on every rank; ``backward`` gives
        the gradient of this rank's columns.

    Raises:
        ValueError: A label out of range (on accelerators: a device-side assertion, without a sync),
            shapes that disagree, V_local that isn't this rank's share, an option out of its range.
            Before any collective; labels are equal on every rank, so all ranks raise together.

    Cost: forward one all-gather of [3, N] float32 (N labels; [4, N] with label_smoothing), backward
    none. Keeps the logits for the backward; the one allocation of their size is their gradient,
    made in the forward for float32 (it holds the exponentials until then), else in the backward.

    Source: Megatron-LM, arXiv:1909.08053, section 3 (parallel cross-entropy); partial softmaxes are
    merged as in online softmax, arXiv:1805.02867.
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
    loss = sharded_ce(
        flat, target, mesh, vocab_size=vocab_size, padded_size=columns, options=options
    )
    return loss.reshape(shape) if reduction == "none" else loss


def sharded_ce(
    logits: Tensor,
    labels: Tensor,
    mesh: DeviceMesh,
    *,
    vocab_size: int,
    padded_size: int,
    options: LossOptions,
) -> Tensor:
    """`vocab_parallel_ce` on checked inputs: logits [N, V_local], labels [N] int64."""
    classes = real_columns(mesh.size(), vocab_size, padded_size)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad  # not to be seen in the forward
    losses: Tensor = _VocabParallelCE.apply(  # type: ignore[no-untyped-call]
        logits, labels, mesh, classes, options, needs_grad
    )
    return reduce_tokens(losses, labels, options)


def shards_columns(logits: DTensor) -> bool:
    """Whether the last dim is sharded over the first mesh dim, in plain chunk order."""
    placement = logits.placements[0]
    # By type: a strided shard has its columns in another order, and is a subclass in some versions.
    return type(placement) is Shard and placement.dim in (-1, logits.ndim - 1)


class _VocabParallelCE(torch.autograd.Function):
    """Loss per token [N]; autograd reduces it, so any gradient may come in, any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mesh: DeviceMesh,
        classes: tuple[int, ...],
        options: LossOptions,
        needs_grad: bool,
    ) -> Tensor:
        rank = mesh.get_local_rank()
        first, mine = sum(classes[:rank]), classes[rank]
        keep = needs_grad and _keeps_exps(logits, options)
        exps = torch.empty_like(logits) if keep else None
        stats = column_stats(logits[:, :mine], labels - first, options, exps)
        top, total, losses = merge_stats(gather_stats(stats, mesh), classes, options)
        # p = exp(x - here) * share: the same bits whether exp(x - here) is kept or computed again
        here = stats[MAX].clone()
        share = (here - top).exp() / total
        lse = top + total.log()
        ctx.save_for_backward(logits, labels, here, share, lse)
        ctx.first, ctx.mine, ctx.vocab_size = first, mine, sum(classes)
        ctx.exps, ctx.options = exps, options
        return losses.masked_fill_(labels == options.ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, here, share, lse = ctx.saved_tensors
        options: LossOptions = ctx.options
        # d loss / d x = p * (1 + 2 z lse) - [column == label] * (1 - eps) - eps / V
        grad = grad.masked_fill(labels == options.ignore_index, 0.0) * options.logit_scale
        on_exp = grad * share
        if options.z_loss:
            on_exp = on_exp * (1 + 2 * options.z_loss * lse)
        target, owned = find_owned(labels - ctx.first, ctx.mine)
        on_target = (grad * (options.label_smoothing - 1)).masked_fill(~owned, 0.0)
        on_all = grad * (options.label_smoothing / ctx.vocab_size)

        exps, ctx.exps = ctx.exps, None  # given away as the gradient: a second backward starts anew
        out = torch.empty_like(logits) if exps is None else exps
        out[:, ctx.mine :] = 0.0
        for rows in row_blocks(logits) if ctx.mine else ():
            block = out[rows, : ctx.mine]
            if exps is None:
                x = shape_logits(logits[rows, : ctx.mine], options)
                work = torch.sub(x, here[rows, None]).exp_()
            else:
                work = block
            work.mul_(on_exp[rows, None]).scatter_add_(1, target[rows, None], on_target[rows, None])
            if options.label_smoothing:
                work.sub_(on_all[rows, None])
            if options.softcap is not None:
                work.mul_(1 - (x / options.softcap).square())
            if exps is None:
                block.copy_(work)  # rounded once, after everything is summed
        return out, None, None, None, None, None


def _local_logits(logits: Tensor, mesh: DeviceMesh, vocab_size: int, columns: int) -> Tensor:
    where, wrong = "vocab_parallel_ce", []
    if isinstance(logits, DTensor):
        if logits.device_mesh != mesh or not shards_columns(logits):
            raise ValueError(
                f"{where}: logits are a DTensor with placements {logits.placements} over"
                f" {logits.device_mesh}; they must be Shard(-1) over {mesh}, or this rank's plain"
                " columns"
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
                f"logits {tuple(logits.shape)} must have {share} columns on this rank, its share of"
                f" {columns} over {mesh.size()} ranks in torch chunk order; pass padded_size if the"
                " vocabulary is padded"
            )
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")
    return logits


def _keeps_exps(logits: Tensor, options: LossOptions) -> bool:
    """Whether exp(x - m) is kept to become the gradient, instead of computed a second time.

    In float32 it costs nothing at the peak (the gradient needs as much) and saves a quarter of the
    time. For shorter dtypes it would need more than the gradient, and a soft cap needs x again.
    """
    same_dtype = logits.dtype == loss_dtype(logits.dtype)
    return same_dtype and options.softcap is None and not torch.compiler.is_compiling()
