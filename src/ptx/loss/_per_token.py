"""Losses over a head, one per token, whose gradients wait for the backward to know their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptx.loss._first_order import first_order
from ptx.loss._head_chunks import Softmax, gradients_of, losses_of
from ptx.loss._head_gradients import Gradients
from ptx.loss._head_inputs import HeadInputs
from ptx.loss._head_task import Task


def per_token(given: HeadInputs) -> tuple[Tensor, Tensor | None]:
    """Loss and, if the task wants it, entropy of every token, [N] each; 0 where ignored.

    One matmul; three more in the backward, which takes any gradient per token on either.
    """
    results = _PerToken.apply(  # type: ignore[no-untyped-call]
        given.hidden, given.weight, given.bias, given.task
    )
    return results if given.task.entropy else (results, None)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
    ) -> Tensor | tuple[Tensor, Tensor]:
        softmax = losses_of(hidden, weight, bias, task)
        # The labels too, though the task has them: a write to them in between has to raise.
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            softmax.here,
            softmax.share,
            softmax.lse,
            softmax.centre,
            task.labels,
        )
        ctx.task = task
        losses = _to_every_row(softmax.losses, hidden, task)
        if softmax.entropy is None:
            return losses
        return losses, _to_every_row(softmax.entropy, hidden, task)

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad: Tensor, entropy_grad: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        task: Task = ctx.task
        hidden, weight, bias, here, share, lse, centre, _ = ctx.saved_tensors
        if task.rows is not None:
            grad = grad[task.rows]
            entropy_grad = None if entropy_grad is None else entropy_grad[task.rows]
        grads = Gradients(hidden, weight, bias, task)
        softmax = Softmax(here, share, lse, lse, centre=centre)
        gradients_of(hidden, weight, bias, task, softmax, grad, grads, entropy_grad)
        return *grads.finished(), None


def _to_every_row(values: Tensor, hidden: Tensor, task: Task) -> Tensor:
    """[n] -> [N], 0 where a row wasn't computed."""
    if task.rows is None:
        return values
    return values.new_zeros(hidden.shape[0]).index_copy_(0, task.rows, values)
