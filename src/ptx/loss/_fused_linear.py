"""Projection to the vocabulary and cross-entropy in one, without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptx._checks import can_read
from ptx.loss._column_stats import real_columns
from ptx.loss._head import Head, find_head, local_part, split_over
from ptx.loss._head_chunks import Softmax, gradients_of, losses_and_gradients, losses_of
from ptx.loss._head_gradients import Gradients, Needs
from ptx.loss._head_task import Task, default_chunk
from ptx.loss._labels import flat_labels, require_classes
from ptx.loss._options import LossOptions, Reduction, loss_dtype

WHERE = "fused_linear_ce"


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

    Hidden states are compared with the labels at the same position: shift labels before.

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
    also the weight's gradient in float32 if there is more than one chunk. With "mean" and "sum" the
    forward computes the gradients (3 matmuls of 2 N H V; 2 if one side is frozen, 1 without grad;
    a second backward 3 more) and the backward multiplies them; "none" computes them in the
    backward (1 + 3). On CPU ignored positions cost nothing. Under tensor parallelism one all-gather
    of [3, N] float32 ([4, N] with label_smoothing), 4 matmuls instead of 3 if there is more than one
    chunk, and in the backward one all-reduce of the hidden state's gradient, or, if it is sharded,
    an all-gather before and a reduce-scatter.

    Source: Liger Kernel, arXiv:2410.10989 (gradients in the forward); Cut Cross-Entropy,
    arXiv:2411.09009; Megatron-LM, arXiv:1909.08053, section 3.
    """
    options = LossOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale
    ).checked(WHERE)
    owner = find_head(head, bias, WHERE)
    amp = _autocast_dtype(hidden)
    _check(hidden, owner, vocab_size, chunk_tokens, amp)
    rows, width = owner.weight.shape
    classes = rows if vocab_size is None else vocab_size
    shape = hidden.shape[:-1]
    target = flat_labels(labels, shape, WHERE)
    require_classes(target, classes, ignore_index, WHERE)

    opened, weight, head_bias = owner.open(hidden)
    weight, mesh = local_part(weight, "weight", WHERE)
    if head_bias is not None:
        head_bias, _ = local_part(head_bias, "bias", WHERE)
    states, sum_hidden = _whole_hidden(opened, mesh)
    states = states.reshape(target.numel(), width)
    if amp is not None:
        states, weight = _cast(states, amp), _cast(weight, amp)
        head_bias = None if head_bias is None else _cast(head_bias, amp)
    kept = _kept_rows(target, ignore_index)
    if kept is not None:
        target = target[kept]
    ranks = 1 if mesh is None else mesh.size()
    task = Task(
        target,
        kept,
        chunk_tokens or default_chunk(target.numel(), width, ranks),
        real_columns(ranks, classes, rows),
        mesh,
        options,
    )
    grad = torch.is_grad_enabled()  # not to be seen in the forward
    needs = Needs(
        *(grad and t is not None and t.requires_grad for t in (states, weight, head_bias))
    )
    loss: Tensor = _FusedLinearCE.apply(  # type: ignore[no-untyped-call]
        states, weight, head_bias, task, needs, sum_hidden
    )
    owner.close(opened, loss)
    return loss.reshape(shape) if reduction == "none" else loss


class _FusedLinearCE(torch.autograd.Function):
    """The loss, reduced; keeps the gradients it computed for one backward, a second starts anew."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: Task,
        needs: Needs,
        sum_hidden: bool,
    ) -> Tensor:
        options, given = task.options, (hidden, weight, bias)
        scale = torch.ones((), dtype=loss_dtype(hidden.dtype), device=hidden.device)
        if options.reduction == "mean":
            scale = scale / (task.labels != options.ignore_index).sum().clamp(min=1)
        ctx.grads = None
        if options.reduction == "none" or not any(needs):
            softmax = losses_of(*given, task)
        else:
            ctx.grads = Gradients(*given, needs, task)
            softmax = losses_and_gradients(*given, task, scale, ctx.grads)
        ctx.save_for_backward(*given, softmax.here, softmax.share, softmax.lse, scale)
        ctx.task, ctx.needs, ctx.sum_hidden = task, needs, sum_hidden
        if options.reduction != "none":
            return softmax.losses.sum() * scale
        if task.rows is None:
            return softmax.losses
        losses = softmax.losses.new_zeros(hidden.shape[0])
        return losses.index_copy_(0, task.rows, softmax.losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        task: Task = ctx.task
        grads, ctx.grads = ctx.grads, None  # given away, so that they can be scaled in place
        factor = grad
        if grads is None:
            hidden, weight, bias, here, share, lse, scale = ctx.saved_tensors
            if task.options.reduction == "none":
                scale = grad if task.rows is None else grad[task.rows]
                factor = torch.ones_like(scale[:0].sum())
            grads = Gradients(hidden, weight, bias, ctx.needs, task)
            softmax = Softmax(here, share, lse, lse)
            gradients_of(hidden, weight, bias, task, softmax, scale, grads)
        hidden_grad, weight_grad, bias_grad = grads.scaled(factor)
        if hidden_grad is not None and ctx.sum_hidden:
            assert task.mesh is not None
            dist.all_reduce(hidden_grad, group=task.mesh.get_group())
        return hidden_grad, weight_grad, bias_grad, None, None, None


def _check(
    hidden: Tensor,
    head: Head,
    vocab_size: int | None,
    chunk_tokens: int | None,
    amp: torch.dtype | None,
) -> None:
    """Refuse what doesn't fit, by what every rank knows, before FSDP gathers anything."""
    weight, bias, wrong = head.weight, head.bias, []
    fits = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or not hidden.is_floating_point():
        raise ValueError(
            f"{WHERE}: hidden {tuple(hidden.shape)} of {hidden.dtype} and the head's weight"
            f" {tuple(weight.shape)} must be [..., H] and [V, H], floating point"
        )
    dtypes = {_seen(head.input_dtype(hidden.dtype), amp), _seen(head.dtype(), amp)}
    if bias is not None:
        dtypes.add(_seen(head.dtype() if head.state is not None else bias.dtype, amp))
        if bias.shape != weight.shape[:1]:
            wrong.append(f"bias {tuple(bias.shape)} must be [V] = [{weight.shape[0]}]")
    if len(dtypes) > 1:
        wrong.append(
            f"hidden is {hidden.dtype}, the head {head.dtype()}; cast one, or use autocast or a"
            " MixedPrecisionPolicy"
        )
    if not head.is_ready():
        wrong.append(
            "the FSDP model that holds the head was not called yet; compute the hidden states by"
            " calling it: model(tokens, return_hidden=True)"
        )
    if vocab_size is not None and not 0 < vocab_size <= weight.shape[0]:
        wrong.append(f"vocab_size={vocab_size} must be in [1, V={weight.shape[0]}]")
    bad_chunk = isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int | None)
    if bad_chunk or (chunk_tokens is not None and chunk_tokens < 1):
        wrong.append(f"chunk_tokens={chunk_tokens!r} must be an int >= 1, or None")
    if head.state is None:
        mesh = split_over(weight, "weight", WHERE)
        if bias is not None and split_over(bias, "bias", WHERE) != mesh:
            wrong.append(
                "bias and weight must be split over the same mesh, or neither of them:"
                " distribute_tensor(bias, mesh['tp'], [Shard(0)])"
            )
    if isinstance(hidden, DTensor):
        placement = hidden.placements[0]
        sharded = type(placement) is Shard and placement.dim < hidden.ndim - 1
        if hidden.device_mesh.ndim != 1 or not (sharded or isinstance(placement, Replicate)):
            wrong.append(
                f"hidden is a DTensor with placements {hidden.placements} on a"
                f" {hidden.device_mesh.ndim}-D mesh; it takes Replicate() or Shard() of a dim other"
                " than the last, on the 1-D tp mesh"
            )
    if wrong:
        raise ValueError(f"{WHERE}: {'; '.join(wrong)}")


def _whole_hidden(hidden: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, bool]:
    """Every token's hidden state, and whether its gradient is to be summed over ``mesh`` here."""
    if not isinstance(hidden, DTensor):
        return hidden, mesh is not None
    if mesh is not None and hidden.device_mesh != mesh:
        raise ValueError(
            f"{WHERE}: hidden is a DTensor over {hidden.device_mesh}, the head's weight is split"
            f" over {mesh}; they must be on the same tp mesh"
        )
    if isinstance(hidden.placements[0], Replicate):
        local: Tensor = hidden.to_local(grad_placements=[Replicate()])
        return local, mesh is not None
    # The backward of redistribute then is a reduce-scatter, half of an all-reduce and a slice.
    placement = Replicate() if mesh is None else Partial()
    whole = hidden.redistribute(placements=[Replicate()])
    local = whole.to_local(grad_placements=[placement])
    return local, False


def _kept_rows(labels: Tensor, ignore_index: int) -> Tensor | None:
    """The rows to compute, if these aren't all: only where their number can be known for free."""
    if not can_read(labels):
        return None
    kept = (labels != ignore_index).nonzero()[:, 0]
    return None if kept.numel() == labels.numel() else kept


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _seen(dtype: torch.dtype, amp: torch.dtype | None) -> torch.dtype:
    """What a matmul computes in: autocast leaves float64 alone."""
    return dtype if amp is None or dtype == torch.float64 else amp


def _cast(tensor: Tensor, amp: torch.dtype) -> Tensor:
    return tensor.to(_seen(tensor.dtype, amp))
