"""Hidden states through a head, a chunk of tokens at a time: their losses, and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ptx._checks import can_read
from ptx.loss._column_stats import (
    MAX,
    SUM_EXP,
    column_stats,
    find_owned,
    gather_stats,
    merge_stats,
    row_blocks,
)
from ptx.loss._options import LossOptions, loss_dtype, shape_logits

# Below, reading the weight and adding up its gradient would cost as much as the matmuls.
MIN_CHUNK = 256


@dataclass(frozen=True)
class Task:
    """What a loss needs besides tensors with a gradient.

    Args:
        labels: [n] int64, global ids, of the rows that are computed.
        rows: [n], where these lie among the N rows of the hidden states; None: n = N, all of them.
        chunk: How many rows at a time.
        classes: How many of the real classes each rank has.
        mesh: The ranks that share the vocabulary; None: this one has all of it.
        options: As everywhere.
    """

    labels: Tensor
    rows: Tensor | None
    chunk: int
    classes: tuple[int, ...]
    mesh: DeviceMesh | None
    options: LossOptions

    @property
    def mine(self) -> int:
        """The number of real classes of this rank, its first rows of the weight."""
        return self.classes[self.rank]

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    def local_labels(self) -> Tensor:
        """[n], the row of this rank's weight; out of its range where another rank has the label."""
        return self.labels - sum(self.classes[: self.rank])

    def chunks(self) -> Iterator[slice]:
        n = self.labels.numel()
        return (slice(start, min(start + self.chunk, n)) for start in range(0, n, self.chunk))


@dataclass(frozen=True)
class Softmax:
    """Per row, [n]: p = exp(x - here) * share, the maximum of this rank's x, the lse, the loss."""

    here: Tensor
    share: Tensor
    lse: Tensor
    losses: Tensor


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients:
    """Gradients of one loss with respect to what is given, added up over chunks.

    In float32 whatever the dtype: rounding the weight's after each chunk would let its error grow
    with their number. The result is rounded once, after it was scaled. For shorter dtypes the
    gradient of the label's logit stays out of the matmuls: it is the largest by far, so rounding it
    would be most of the error, and it meets one row of the weight only.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, task: Task
    ) -> None:
        self.task = task
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.dtype, dtype = hidden.dtype, loss_dtype(hidden.dtype)
        if needs.hidden:
            # Rows that aren't computed must come out as 0.
            allocate = hidden.new_empty if task.rows is None else hidden.new_zeros
            self.hidden = allocate(hidden.shape)
        if needs.weight:
            self.weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.weight[task.mine if task.labels.numel() else 0 :] = 0.0
        if bias is not None and needs.bias:
            self.bias = torch.zeros_like(bias)
        self.weight_sum: Tensor | None = None
        # The labels' part of a single chunk's weight gradient: rows of the weight, and their sums.
        self.label_rows: tuple[Tensor, Tensor] | None = None
        self.bias_sum = None if self.bias is None else self.bias.to(dtype)
        self.columns, self.owned = find_owned(task.local_labels(), task.mine)
        # [n], the gradient of the label's logit if it is kept apart, 0 where it isn't this rank's.
        self.apart: Tensor | None = None
        if hidden.dtype != dtype and task.mine:
            self.apart = hidden.new_zeros(task.labels.numel(), dtype=dtype)

    def set_apart(self, rows: slice, grad: Tensor) -> None:
        """Take the labels' entries out of a block's gradient of the logits, [r, mine]."""
        if self.apart is None:
            return
        columns, owned = self.columns[rows, None], self.owned[rows, None]
        values = grad.gather(1, columns)
        grad.scatter_(1, columns, values.masked_fill(owned, 0.0))
        self.apart[rows] = values.masked_fill(~owned, 0.0)[:, 0]

    def add(self, logits: _Logits, rows: slice) -> None:
        """Take a chunk whose logits were replaced by their gradient."""
        grad, logits.rows = logits.chunk, None
        if self.hidden is not None:
            product = torch.mm(grad, logits.weight)
            if self.apart is not None:
                labels = logits.weight[self.columns[rows]].to(self.apart.dtype)
                product = labels.mul_(self.apart[rows, None]).add_(product)
            if self.task.rows is None:
                self.hidden[rows] = product
            else:
                self.hidden.index_copy_(0, self.task.rows[rows], product.to(self.hidden.dtype))
        if self.weight is not None:
            out = self.weight[: self.task.mine]
            if self.apart is not None:
                torch.mm(grad.t(), logits.states, out=out)
                self._add_apart(out, logits.states, rows)
            elif rows.start:
                torch.addmm(out, grad.t(), logits.states, out=out)
            else:
                torch.mm(grad.t(), logits.states, out=out)

    def _add_apart(self, product: Tensor, states: Tensor, rows: slice) -> None:
        """Add a chunk's matmul, in ``product``, and its labels' rows to the sum in float32."""
        assert self.apart is not None
        columns = self.columns[rows]
        values = states.to(self.apart.dtype).mul_(self.apart[rows, None])
        if rows.start == 0 and rows.stop == self.task.labels.numel():
            # A single chunk needs no sum of the whole size.
            count = torch.arange(rows.stop, device=columns.device)
            one_of = columns.new_zeros(self.task.mine).scatter_(0, columns, count)[columns]
            sums = torch.zeros_like(values).index_put_((one_of,), values, accumulate=True)
            self.label_rows = columns, sums[one_of]
            return
        if self.weight_sum is None:
            self.weight_sum = product.to(self.apart.dtype)
        elif rows.stop < self.task.labels.numel():
            for block in row_blocks(product):
                self.weight_sum[block].add_(product[block])
        # else: the last one is added when all is rounded, which saves a pass.
        self.weight_sum.index_put_((columns,), values, accumulate=True)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All of them times ``factor``, a scalar. Once only: they are scaled in place."""
        weight, changes = self.weight, not (can_read(factor) and factor == 1)
        if weight is not None and self.weight_sum is not None:
            product = weight[: self.task.mine]
            for rows in row_blocks(product):
                product[rows] = ((self.weight_sum[rows] + product[rows]) * factor).to(self.dtype)
            self.weight_sum = None
        elif weight is not None:
            if self.label_rows is not None:
                columns, sums = self.label_rows
                sums = (weight[columns] + sums) * factor
            if changes:
                weight.mul_(factor)
            if self.label_rows is not None:  # a row that several labels meet is written as often
                weight[columns] = sums.to(self.dtype)
        if self.hidden is not None and changes:
            self.hidden.mul_(factor)
        if self.bias is not None and self.bias_sum is not None:
            self.bias.copy_(self.bias_sum * factor)
        return self.hidden, weight, self.bias


def default_chunk(tokens: int, width: int, ranks: int = 1) -> int:
    """Rows for which a chunk of logits is about as large as the weight, in chunks of like size.

    Of ``ranks`` that share the vocabulary each has a chunk as large as the whole weight: in return
    most batches are a single chunk, which then need no matmul twice.
    """
    largest = max(width * ranks, MIN_CHUNK)
    chunks = max(1, -(-tokens // largest))
    rows = -(-tokens // chunks)
    return max(1, min(largest, -(-rows // 16) * 16))


def losses_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task) -> Softmax:
    """One matmul: the losses without a gradient."""
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
        _add_gradients(logits, softmax, row_scale, into)
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
            lse = here + total.log()
            _to_gradient(part, exps, at, 1 / total, lse, row_scale[at], into)
        into.add(logits, rows)
    return _merge(stats, task)


def gradients_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    task: Task,
    softmax: Softmax,
    scale: Tensor,
    into: Gradients,
) -> None:
    """Three matmuls: the gradients of sum(scale * losses), bit for bit those of the forward.

    ``scale``: a scalar, or [n].
    """
    row_scale = _row_scale(scale, task)
    _add_gradients(_Logits(hidden, weight, bias, task), softmax, row_scale, into)


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
        stats[:, rows] = column_stats(logits.project(rows), target[rows], task.options)
    return _merge(stats, task)


def _add_gradients(logits: _Logits, softmax: Softmax, row_scale: Tensor, into: Gradients) -> None:
    task = logits.task
    for rows in task.chunks():
        chunk = logits.project(rows)
        for block in row_blocks(chunk):
            at = _shift(block, rows)
            part = chunk[block]
            exps = _float_copy(part, task.options)
            x = shape_logits(exps, task.options)
            torch.sub(x, softmax.here[at, None], out=exps).exp_()
            share, lse = softmax.share[at], softmax.lse[at]
            _to_gradient(part, exps, at, share, lse, row_scale[at], into)
        into.add(logits, rows)


def _to_gradient(
    logits: Tensor,
    exps: Tensor,
    at: slice,
    share: Tensor,
    lse: Tensor,
    scale: Tensor,
    into: Gradients,
) -> None:
    """Replace a block's logits, [r, mine], by the gradient of sum(scale * losses).

    d loss / d x = p * (1 + 2 z lse) - [column == label] * (1 - eps) - eps / V

    Args:
        logits: As they came out of the matmul.
        exps: exp(x - here), float32; overwritten.
        at: The rows' place in the task.
        share: [r], see `Softmax`.
        lse: [r].
        scale: [r], of each loss.
        into: Where the bias's gradient goes, and the labels' entries may.
    """
    task = into.task
    options = task.options
    scale = scale * options.logit_scale
    on_exp = scale * share
    if options.z_loss:
        on_exp = on_exp * (1 + 2 * options.z_loss * lse)
    columns, owned = into.columns[at, None], into.owned[at]
    on_target = (scale * (options.label_smoothing - 1)).masked_fill(~owned, 0.0)
    if task.mine:
        exps.mul_(on_exp[:, None]).scatter_add_(1, columns, on_target[:, None])
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
    ignored = task.labels == task.options.ignore_index
    return scale.expand(ignored.numel()).masked_fill(ignored, 0.0)


def _new_stats(logits: _Logits) -> Tensor:
    kinds = 4 if logits.task.options.label_smoothing else 3
    shape = kinds, logits.task.labels.numel()
    return logits.hidden.new_zeros(shape, dtype=loss_dtype(logits.hidden.dtype))


def _merge(stats: Tensor, task: Task) -> Softmax:
    every = stats[None] if task.mesh is None else gather_stats(stats, task.mesh)
    top, total, losses = merge_stats(every, task.classes, task.options)
    losses = losses.masked_fill(task.labels == task.options.ignore_index, 0.0)
    here = stats[MAX].clone()
    return Softmax(here, (here - top).exp() / total, top + total.log(), losses)


def _float_copy(logits: Tensor, options: LossOptions) -> Tensor:
    """To be overwritten: the logits themselves where nothing needs them any more, else a copy."""
    dtype = loss_dtype(logits.dtype)
    keep = logits.dtype != dtype or options.softcap is not None
    return logits.to(dtype, copy=True) if keep else logits


def _shift(block: slice, rows: slice) -> slice:
    stop = rows.stop if block.stop is None else rows.start + block.stop
    return slice(rows.start + (block.start or 0), min(stop, rows.stop))
