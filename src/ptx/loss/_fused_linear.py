"""Projection to the vocabulary and cross-entropy in one, without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptx.loss._first_order import first_order
from ptx.loss._head_chunks import Softmax, gradients_of, losses_and_gradients, losses_of
from ptx.loss._head_gradients import Gradients
from ptx.loss._head_inputs import open_head
from ptx.loss._head_task import Task
from ptx.loss._one_break import eager_if_gathered
from ptx.loss._options import LossOptions, Reduction, loss_dtype, reduce_tokens
from ptx.loss._per_token import per_token


@eager_if_gathered
def fused_linear_ce(
    hidden: Tensor,
    head: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T (+ bias)``, without these logits but for a few tokens.

    Takes the place of the head and the loss after it::

        hidden = model(tokens, return_hidden=True)
        loss = fused_linear_ce(hidden, model.output, labels)

    **You shift the labels**: hidden states at position t are compared with labels at position t.

    Args:
        hidden: [..., H], any float dtype, with that of the head (or one that autocast or the head's
            ``MixedPrecisionPolicy`` makes equal). Plain, and then equal on every rank of the tp
            mesh; or a DTensor on it, ``Replicate()`` or sharded over a dim other than the last.
        head: The weight, [V, H], plain or a DTensor ``Shard(0)`` over the tp mesh (any V over any
            number of ranks); or the ``nn.Linear`` that holds it, whatever `apply_tp` and FSDP2 made
            of it, in any FSDP group. It isn't called: FSDP gathers the weight as it would.
        labels: [...], any integer dtype: ids in [0, V) or ``ignore_index``. Plain, or a replicated
            DTensor; equal on every rank of the tp mesh.
        bias: [V], placed as the weight is. Not with a module, which has its own.
        vocab_size: Number of real classes, if the last rows of the weight are padding (no
            probability, no gradient); None: all V.
        chunk_tokens: How many tokens' logits exist at a time; None: about as many as make them as
            large as the weight (on each rank of a tp mesh as the whole weight).
        ignore_index: Label whose positions add neither loss nor gradient.
        reduction: "mean" divides by the number of kept labels; "sum" doesn't divide; "none" gives
            [...], 0 where ignored.
        label_smoothing: Share of the target that is spread over all V classes (torch's convention).
        z_loss: Weight of lse**2, reduced like the cross-entropy.
        softcap: Replace logits a by softcap * tanh(a / softcap), after ``logit_scale``.
        logit_scale: Multiplies the logits first; 1 / temperature.

    Returns:
        Plain float32 loss (float64 for float64 logits), equal on every rank of the tp mesh.

    Raises:
        ValueError: A label out of range (on accelerators: a device-side assertion, without a sync),
            shapes or dtypes that disagree, an FSDP shard without its module, a module that computes
            something else or has hooks of others, an option out of its range. Before any
            collective.

    Cost: memory of one chunk of logits in the dtype of the matmul, plus the gradients; for bfloat16
    also the weight's gradient in float32 if there is more than one chunk, for float16 always. With
    "mean" and "sum" the forward computes the gradients (3 matmuls of 2 N H V; 2 if one side is
    frozen, 1 without grad; a second backward 3 more) and the backward multiplies them; "none" and
    float16 compute them in the backward (1 + 3). On CPU ignored positions cost nothing. Under
    tensor parallelism one all-gather of [3, N] float32 ([4, N] with label_smoothing), 4 matmuls
    instead of 3 if there is more than one chunk, and in the backward one all-reduce of the hidden
    state's gradient, or, if it is sharded, an all-gather before and a reduce-scatter.

    Source: Liger Kernel, arXiv:2410.10989 (gradients in the forward); Cut Cross-Entropy,
    arXiv:2411.09009; Megatron-LM, arXiv:1909.08053, section 3.
    """
    where = "fused_linear_ce"
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(where)
    given = open_head(
        hidden,
        head,
        labels,
        bias=bias,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        options=options,
        where=where,
    )
    if reduction == "none" or given.hidden.dtype == torch.float16:
        # In float16's short range a gradient that isn't scaled yet would overflow, or be lost.
        losses, _ = per_token(given)
        given.close(losses)
        loss = reduce_tokens(losses, given.task.labels, options)
    else:
        loss = _FusedLinearCE.apply(  # type: ignore[no-untyped-call]
            given.hidden, given.weight, given.bias, given.task
        )
        given.close(loss)
    return loss.reshape(given.shape) if reduction == "none" else loss


class _FusedLinearCE(torch.autograd.Function):
    """The loss, reduced; keeps the gradients it computed for one backward, a second starts anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
    ) -> Tensor:
        tensors = hidden, weight, bias
        scale = torch.ones((), dtype=loss_dtype(hidden.dtype), device=hidden.device)
        if task.options.reduction == "mean":
            scale = scale / (task.labels != task.options.ignore_index).sum().clamp(min=1)
        ctx.grads = None
        if any(task.needs):
            ctx.grads = Gradients(*tensors, task)
            softmax = losses_and_gradients(*tensors, task, scale, ctx.grads)
        else:
            softmax = losses_of(*tensors, task)
        # The labels too, though the task has them: a write to them in between has to raise.
        ctx.save_for_backward(
            *tensors, softmax.here, softmax.share, softmax.lse, scale, task.labels
        )
        ctx.task = task
        return softmax.losses.sum() * scale

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        task: Task = ctx.task
        grads, ctx.grads = ctx.grads, None  # given away, so that they can be scaled in place
        if grads is None:
            hidden, weight, bias, here, share, lse, scale, _ = ctx.saved_tensors
            grads = Gradients(hidden, weight, bias, task)
            softmax = Softmax(here, share, lse, lse)
            gradients_of(hidden, weight, bias, task, softmax, scale, grads)
        return *grads.finished(grad), None
