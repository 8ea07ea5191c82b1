"""Hidden states through a head, a chunk of tokens at a time: their losses, and all gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptx.loss._column_stats import (
    DEEPEST,
    MAX,
    SUM_EXP,
    column_stats,
    gather_stats,
    merge_entropy,
    merge_stats,
    new_stats,
    row_blocks,
)
from ptx.loss._head_gradients import Gradients
from ptx.loss._head_task import Task
from ptx.loss._options import LossOptions, loss_dtype, shape_logits


@dataclass(frozen=True)
class Softmax:
    """Per row, [n].

    Args:
        here: The maximum of this rank's x.
        share: p = exp(x - here) * share.
        lse: Over all ranks.
        losses: 0 where ignored.
        entropy: In nats, 0 where ignored; None if the task doesn't want it.
        centre: E[x] - here; None likewise.
    """

    here: Tensor
    share: Tensor
    lse: Tensor
    losses: Tensor
    entropy: Tensor | None = None
    centre: Tensor | None = None


def losses_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task) -> Softmax:
    """One matmul: losses, and entropies if they are wanted, without a gradient."""
    return _losses(_Logits(hidden, weight, bias, task))


def losses_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task, scale: Tensor, into: Gradients
) -> Softmax:
    """Losses, and the gradients of ``scale`` times their sum.

    Three matmuls. If several ranks share the vocabulary and there is more than one chunk, four: no
    gradient is known before the ranks have exchanged the statistics of all rows, once.
    """
    logits = _Logits(hidden, weight, bias, task)
    row_scale = _row_scale(scale, task)
    if task.mesh is not None:
        softmax = _losses(logits)
        _add_gradients(logits, softmax, row_scale, None, into)
        return softmax
    stats = _new_stats(logits)
    for rows in task.chunks():
        chunk = logits.project(rows)
        for block in row_blocks(chunk):
            at = _shift(block, rows)
            part, labels = chunk[block], task.labels[at]
            exps = _float_copy(part, task.options)
            stats[:, at] = column_stats(exps, labels, task.options, exps)
            here, total = stats[MAX, at], stats[SUM_EXP, at]
            on_exp = _on_exp(row_scale[at] * (1 / total), here + total.log(), task.options)
            _to_gradient(part, exps, at, on_exp[:, None], row_scale[at], into)
        into.add(rows, chunk, logits.states, logits.weight)
        logits.rows = None
    return _merge(stats, task)


def gradients_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    task: Task,
    softmax: Softmax,
    scale: Tensor,
    into: Gradients,
    entropy_scale: Tensor | None = None,
) -> None:
    """Three matmuls: the gradients of sum(scale * losses) + sum(entropy_scale * entropies).

    Without entropies, bit for bit those of the forward. Both scales: a scalar, or [n].
    """
    rows = _row_scale(scale, task)
    of_entropy = None if entropy_scale is None else _row_scale(entropy_scale, task)
    _add_gradients(_Logits(hidden, weight, bias, task), softmax, rows, of_entropy, into)


class _Logits:
    """Computes the logits of a chunk, all chunks in the same memory.

    Attributes:
        weight: [mine, H], this rank's real classes.
        states: [c, H], the hidden states of the current chunk.
        chunk: [c, mine], its logits; whoever overwrites them says so by ``rows = None``.
        rows: The current chunk.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task) -> None:
        self.hidden, self.task = hidden, task
        self.weight = weight[: task.mine]
        self.bias = None if bias is None else bias[: task.mine]
        self.memory = hidden.new_empty(min(task.chunk, task.labels.numel()), task.mine)
        self.states, self.chunk = hidden, self.memory
        self.rows: slice | None = None

    def project(self, rows: slice) -> Tensor:
        """The logits of these rows, which may be there from the last call."""
        if self.rows == rows:
            return self.chunk
        if self.task.rows is None:
            self.states = self.hidden[rows]
        else:
            self.states = self.hidden.index_select(0, self.task.rows[rows])
        self.chunk, self.rows = self.memory[: rows.stop - rows.start], rows
        if self.bias is None:
            torch.mm(self.states, self.weight.t(), out=self.chunk)
        else:
            torch.addmm(self.bias, self.states, self.weight.t(), out=self.chunk)
        return self.chunk


def _losses(logits: _Logits) -> Softmax:
    task, stats = logits.task, _new_stats(logits)
    target = task.local_labels()
    for rows in task.chunks():
        stats[:, rows] = column_stats(
            logits.project(rows), target[rows], task.options, entropy=task.entropy
        )
    return _merge(stats, task)


def _add_gradients(
    logits: _Logits,
    softmax: Softmax,
    scale: Tensor,
    entropy_scale: Tensor | None,
    into: Gradients,
) -> None:
    task = logits.task
    for rows in task.chunks():
        chunk = logits.project(rows)
        for block in row_blocks(chunk):
            at = _shift(block, rows)
            part, share = chunk[block], softmax.share[at]
            exps = _float_copy(part, task.options)
            x = shape_logits(exps, task.options)
            torch.sub(x, softmax.here[at, None], out=exps)
            on_exp = _on_exp(scale[at] * share, softmax.lse[at], task.options)[:, None]
            if entropy_scale is not None:
                assert softmax.centre is not None
                # d entropy / d x = p * (E[x] - x)
                slope = (entropy_scale[at] * share)[:, None]
                distance = softmax.centre[at, None] - exps.clamp(min=DEEPEST)
                on_exp = distance.mul_(slope).add_(on_exp)
            _to_gradient(part, exps.exp_(), at, on_exp, scale[at], into)
        into.add(rows, chunk, logits.states, logits.weight)
        logits.rows = None


def _on_exp(scale: Tensor, lse: Tensor, options: LossOptions) -> Tensor:
    """[r], by which exp(x - here) is multiplied in the gradient."""
    return scale * (1 + 2 * options.z_loss * lse) if options.z_loss else scale


def _to_gradient(
    logits: Tensor, exps: Tensor, at: slice, on_exp: Tensor, scale: Tensor, into: Gradients
) -> None:
    """Replace a block's logits, [r, mine], by the gradient of sum(scale * losses).

    d loss / d x = p * (1 + 2 z lse) - [column == label] * (1 - eps) - eps / V

    Args:
        logits: As they came out of the matmul.
        exps: exp(x - here), float32; overwritten.
        at: The rows' place in the task.
        on_exp: [r, 1], the factor that makes it the first term; or [r, mine], with the entropy's.
        scale: [r], of each loss.
        into: Where the bias's gradient goes, and the labels' entries may.
    """
    task = into.task
    options = task.options
    columns, owned = into.columns[at, None], into.owned[at]
    on_target = (scale * (options.label_smoothing - 1)).masked_fill(~owned, 0.0)
    if task.mine:
        exps.mul_(on_exp).scatter_add_(1, columns, on_target[:, None])
    if options.label_smoothing:
        exps.sub_((scale * (options.label_smoothing / sum(task.classes)))[:, None])
    if options.softcap is not None:
        exps.mul_(1 - (shape_logits(logits, options) / options.softcap).square())
    if into.bias_sum is not None:
        into.bias_sum[: task.mine].add_(exps.sum(dim=0))
    into.set_apart(at, exps)
    if exps is not logits:
        logits.copy_(exps)  # rounded once, after everything is summed


def _row_scale(scale: Tensor, task: Task) -> Tensor:
    """[n], of the logits' gradient; 0 where ignored."""
    ignored = task.labels == task.options.ignore_index
    scale = scale * task.options.logit_scale
    return scale.expand(ignored.numel()).masked_fill(ignored, 0.0)


def _new_stats(logits: _Logits) -> Tensor:
    task = logits.task
    return new_stats(logits.hidden, task.labels.numel(), task.options, task.entropy)


def _merge(stats: Tensor, task: Task) -> Softmax:
    every = gather_stats(stats, task.mesh)
    top, total, losses = merge_stats(every, task.classes, task.options)
    ignored = task.labels == task.options.ignore_index
    losses = losses.masked_fill(ignored, 0.0)
    here = stats[MAX].clone()
    softmax = here, (here - top).exp() / total, top + total.log(), losses
    if not task.entropy:
        return Softmax(*softmax)
    entropy = merge_entropy(every, top, total)
    centre = total.log() - entropy + (top - here)
    return Softmax(*softmax, entropy.masked_fill(ignored, 0.0), centre)


def _float_copy(logits: Tensor, options: LossOptions) -> Tensor:
    """To be overwritten: the logits themselves where nothing needs them any more, else a copy."""
    dtype = loss_dtype(logits.dtype)
    keep = logits.dtype != dtype or options.softcap is not None
    return logits.to(dtype, copy=True) if keep else logits


def _shift(block: slice, rows: slice) -> slice:
    stop = rows.stop if block.stop is None else rows.start + block.stop
    return slice(rows.start + (block.start or 0), min(stop, rows.stop))
