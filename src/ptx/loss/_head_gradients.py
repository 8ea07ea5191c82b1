"""Gradients of a loss over a head, added up over chunks of tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ptx._checks import can_read
from ptx.loss._column_stats import find_owned, row_blocks
from ptx.loss._head_task import Task
from ptx.loss._options import loss_dtype


class Gradients:
    """Gradients of one loss with respect to what is given, added up over chunks.

    The weight's in float32 whatever the dtype: rounded after each chunk, its error would grow with
    their number. It is rounded once, after it was scaled.

    For bfloat16 the gradient of the label's logit stays out of the matmuls: it is the largest by
    far, so rounding it would be most of the error, and it meets one row of the weight only. Not so
    for float16, in whose short range a part of a sum may overflow where the sum is small; for the
    same reason a chunk's product isn't rounded there.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task) -> None:
        self.task, needs = task, task.needs
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.dtype, dtype = hidden.dtype, loss_dtype(hidden.dtype)
        self.is_float16 = hidden.dtype == torch.float16
        if needs.hidden:
            # Rows that aren't computed must come out as 0.
            allocate = hidden.new_empty if task.rows is None else hidden.new_zeros
            self.hidden = allocate(hidden.shape)
        if needs.weight:
            self.weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            is_written = task.labels.numel() and not self.is_float16
            self.weight[task.mine if is_written else 0 :] = 0.0
        if bias is not None and needs.bias:
            self.bias = torch.zeros_like(bias)
        self.weight_sum: Tensor | None = None
        if self.weight is not None and self.is_float16:
            self.weight_sum = torch.zeros_like(self.weight[: task.mine], dtype=dtype)
        # The labels' part of a single chunk's weight gradient: rows of the weight, and their sums.
        self.label_rows: tuple[Tensor, Tensor] | None = None
        self.bias_sum = None if self.bias is None else self.bias.to(dtype)
        self.columns, self.owned = find_owned(task.local_labels(), task.mine)
        # [n], the gradient of the label's logit if it is kept apart, 0 where it isn't this rank's.
        self.apart: Tensor | None = None
        if hidden.dtype != dtype and not self.is_float16 and task.mine:
            self.apart = hidden.new_zeros(task.labels.numel(), dtype=dtype)

    def set_apart(self, rows: slice, grad: Tensor) -> None:
        """Take the labels' entries out of a block's gradient of the logits, [r, mine]."""
        if self.apart is None:
            return
        columns, owned = self.columns[rows, None], self.owned[rows, None]
        values = grad.gather(1, columns)
        grad.scatter_(1, columns, values.masked_fill(owned, 0.0))
        self.apart[rows] = values.masked_fill(~owned, 0.0)[:, 0]

    def add(self, rows: slice, grad: Tensor, states: Tensor, head: Tensor) -> None:
        """Take a chunk's gradient of the logits, [c, mine], of hidden states [c, H] and head."""
        if self.hidden is not None:
            product = torch.mm(grad, head)
            if self.apart is not None:
                labels = head[self.columns[rows]].to(self.apart.dtype)
                product = labels.mul_(self.apart[rows, None]).add_(product)
            if self.task.rows is None:
                self.hidden[rows] = product
            else:
                self.hidden.index_copy_(0, self.task.rows[rows], product.to(self.hidden.dtype))
        if self.weight is not None:
            out = self.weight[: self.task.mine]
            if self.is_float16:
                self._add_float(grad, states)
            elif self.apart is not None:
                torch.mm(grad.t(), states, out=out)
                self._add_apart(out, states, rows)
            elif rows.start:
                torch.addmm(out, grad.t(), states, out=out)
            else:
                torch.mm(grad.t(), states, out=out)

    def _add_float(self, grad: Tensor, states: Tensor) -> None:
        """Add a chunk's matmul without rounding it, for some rows of the weight at a time."""
        assert self.weight_sum is not None
        dtype = self.weight_sum.dtype
        for rows in row_blocks(grad.t()):
            part = grad[:, rows].t()
            if part.is_cuda:  # the one device that can multiply float16 into float32
                product = torch.mm(part, states, out_dtype=dtype)
            else:
                product = torch.mm(part.to(dtype), states.to(dtype))
            self.weight_sum[rows].add_(product)

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

    def finished(
        self, factor: Tensor | float = 1.0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All of them times ``factor``, a scalar; the hidden states' summed over ranks if need be.

        Once only: they are scaled in place.
        """
        is_known = isinstance(factor, float) or can_read(factor)
        weight, changes = self.weight, not (is_known and factor == 1)
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
        if self.hidden is not None and self.task.sum_hidden:
            assert self.task.mesh is not None
            dist.all_reduce(self.hidden, group=self.task.mesh.get_group())
        return self.hidden, weight, self.bias
