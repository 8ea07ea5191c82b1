"""Cross-entropy of this rank's columns of the logits, a block of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ptx.loss._column_stats import (
    MAX,
    column_stats,
    find_owned,
    gather_stats,
    merge_stats,
    real_columns,
    row_blocks,
)
from ptx.loss._first_order import first_order
from ptx.loss._logits import FlatLogits
from ptx.loss._options import LossOptions, loss_dtype, reduce_tokens, shape_logits


def column_ce(
    given: FlatLogits,
    options: LossOptions,
    *,
    most_rows: int | None = None,
    keep_exps: bool = True,
) -> Tensor:
    """The loss; [N] if it isn't reduced.

    Args:
        given: Checked.
        options: As everywhere.
        most_rows: The most rows to work on at a time; None: what is fastest.
        keep_exps: Whether the forward may allocate the gradient, to keep exponentials in it.
    """
    logits, labels, mesh = given.logits, given.labels, given.mesh
    ranks = 1 if mesh is None else mesh.size()
    classes = real_columns(ranks, given.vocab_size, given.padded_size)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad  # not to be seen in the forward
    keep = keep_exps and needs_grad and _gains_from_exps(logits, options)
    losses: Tensor = _ColumnCE.apply(  # type: ignore[no-untyped-call]
        logits, labels, mesh, classes, options, most_rows, keep
    )
    return reduce_tokens(losses, labels, options)


class _ColumnCE(torch.autograd.Function):
    """Loss per token [N]; autograd reduces it, so any gradient may come in, any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mesh: DeviceMesh | None,
        classes: tuple[int, ...],
        options: LossOptions,
        most_rows: int | None,
        keep: bool,
    ) -> Tensor:
        rank = 0 if mesh is None else mesh.get_local_rank()
        first, mine = sum(classes[:rank]), classes[rank]
        exps = torch.empty_like(logits) if keep else None
        stats = column_stats(logits[:, :mine], labels - first, options, exps, most_rows=most_rows)
        top, total, losses = merge_stats(gather_stats(stats, mesh), classes, options)
        # p = exp(x - here) * share: the same bits whether exp(x - here) is kept or computed again
        here = stats[MAX].clone()
        share = (here - top).exp() / total
        lse = top + total.log()
        ctx.save_for_backward(logits, labels, here, share, lse)
        ctx.first, ctx.mine, ctx.vocab_size = first, mine, sum(classes)
        ctx.exps, ctx.options, ctx.most_rows = exps, options, most_rows
        return losses.masked_fill_(labels == options.ignore_index, 0.0)

    @staticmethod
    @first_order
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
        in_place = out.dtype == grad.dtype and not torch.compiler.is_compiling()
        for rows in row_blocks(logits, ctx.most_rows) if ctx.mine else ():
            work = block = out[rows, : ctx.mine]
            if exps is None:
                x = shape_logits(logits[rows, : ctx.mine], options)
                # Never into x, which may be the logits themselves.
                work = torch.sub(x, here[rows, None], out=block if in_place else None).exp_()
            work.mul_(on_exp[rows, None])
            _add_at(work, target[rows, None], on_target[rows, None])
            if options.label_smoothing:
                work.sub_(on_all[rows, None])
            if options.softcap is not None:
                work.mul_(1 - (x / options.softcap).square())
            if not in_place:
                block.copy_(work)  # rounded once, after everything is summed
        return out, None, None, None, None, None, None


def _add_at(grad: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add to one column of each row; ``columns`` and ``values`` are [r, 1]."""
    if torch.compiler.is_compiling():  # which fuses this with the rest, but no scatter
        grad.add_((torch.arange(grad.shape[1], device=grad.device) == columns) * values)
    else:
        grad.scatter_add_(1, columns, values)


def _gains_from_exps(logits: Tensor, options: LossOptions) -> bool:
    """Whether exp(x - m) is kept to become the gradient, instead of computed a second time.

    In float32 it costs nothing at the peak (the gradient needs as much) and saves a quarter of the
    time. For shorter dtypes it would need more than the gradient, and a soft cap needs x again.
    """
    same_dtype = logits.dtype == loss_dtype(logits.dtype)
    return same_dtype and options.softcap is None and not torch.compiler.is_compiling()
