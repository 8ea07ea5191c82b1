"""What a loss over a head computes with: every token's hidden state, this rank's rows of the weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptx._checks import can_read
from ptx.loss._arguments import device_errors, require_tensors, size_errors
from ptx.loss._column_stats import real_columns
from ptx.loss._head import Head, find_head, local_part, split_over
from ptx.loss._head_task import Needs, Task, default_chunk
from ptx.loss._labels import flat_labels, require_classes
from ptx.loss._logits import require_share
from ptx.loss._options import LossOptions, chunk_errors


@dataclass(frozen=True)
class HeadInputs:
    """Hidden states and a head, checked, gathered and in one dtype.

    Args:
        hidden: [N, H].
        weight: [V_local, H].
        bias: [V_local], or None.
        task: The rest.
        shape: The labels' own.
        head: Who owns the weight.
        opened: The hidden states as ``head.open`` returned them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    task: Task
    shape: torch.Size
    head: Head
    opened: Tensor

    def close(self, *results: Tensor) -> None:
        """Give the head back; ``results`` as they came out of the autograd function."""
        self.head.close(self.opened, *results)


def open_head(
    hidden: Tensor,
    head: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None,
    vocab_size: int | None,
    chunk_tokens: int | None,
    options: LossOptions,
    where: str,
    entropy: bool = False,
) -> HeadInputs:
    """Check everything, then gather what FSDP and tensor parallelism have sharded.

    Raises:
        ValueError: As `fused_linear_ce`, whose arguments these are.
    """
    require_tensors(where, hidden=hidden, labels=labels)
    owner = find_head(head, bias, where)
    amp = _autocast_dtype(hidden)
    _check(hidden, owner, vocab_size, chunk_tokens, amp, where)
    rows, width = owner.weight.shape
    classes = rows if vocab_size is None else vocab_size
    shape = hidden.shape[:-1]
    target = flat_labels(labels, shape, where)
    require_classes(target, classes, options.ignore_index, where)

    opened, weight, head_bias = owner.open(hidden)
    weight, mesh = local_part(weight, "weight", where)
    if head_bias is not None:
        head_bias, _ = local_part(head_bias, "bias", where)
    states, sum_hidden = _whole_hidden(opened, mesh, where)
    states = states.reshape(target.numel(), width)
    if amp is not None:
        states, weight = _cast(states, amp), _cast(weight, amp)
        head_bias = None if head_bias is None else _cast(head_bias, amp)
    kept = _kept_rows(target, options.ignore_index)
    if kept is not None:
        target = target[kept]
    ranks = 1 if mesh is None else mesh.size()
    grad = torch.is_grad_enabled()  # not to be seen in an autograd function's forward
    task = Task(
        target,
        kept,
        chunk_tokens or default_chunk(target.numel(), width, ranks),
        real_columns(ranks, classes, rows),
        mesh,
        options,
        Needs(*(grad and t is not None and t.requires_grad for t in (states, weight, head_bias))),
        sum_hidden,
        entropy,
    )
    return HeadInputs(states, weight, head_bias, task, shape, owner, opened)


def _check(
    hidden: Tensor,
    head: Head,
    vocab_size: int | None,
    chunk_tokens: int | None,
    amp: torch.dtype | None,
    where: str,
) -> None:
    """Refuse what doesn't fit, by what every rank knows, before FSDP gathers anything."""
    weight, bias, wrong = head.weight, head.bias, []
    fits = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or not hidden.is_floating_point():
        raise ValueError(
            f"{where}: hidden {tuple(hidden.shape)} of {hidden.dtype} and the head's weight"
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
    if vocab_size is not None:
        wrong += size_errors("vocab_size", vocab_size, weight.shape[0], "V")
    wrong += chunk_errors(chunk_tokens)
    if head.state is None:
        wrong += device_errors(hidden=hidden, weight=weight, bias=bias)
        mesh = split_over(weight, "weight", where)
        if mesh is not None and isinstance(weight, DTensor):
            rows = weight.to_local().shape[0]
            require_share(rows, weight.shape[0], mesh, "rows of the head's weight", where)
        if bias is not None and split_over(bias, "bias", where) != mesh:
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
        raise ValueError(f"{where}: {'; '.join(wrong)}")


def _whole_hidden(hidden: Tensor, mesh: DeviceMesh | None, where: str) -> tuple[Tensor, bool]:
    """Every token's hidden state, and whether its gradient is to be summed over ``mesh`` here."""
    if not isinstance(hidden, DTensor):
        return hidden, mesh is not None
    if mesh is not None and hidden.device_mesh != mesh:
        raise ValueError(
            f"{where}: hidden is a DTensor over {hidden.device_mesh}, the head's weight is split"
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
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast doesn't know meta
        return None
    return torch.get_autocast_dtype(kind)


def _seen(dtype: torch.dtype, amp: torch.dtype | None) -> torch.dtype:
    """What a matmul computes in: autocast leaves float64 alone."""
    return dtype if amp is None or dtype == torch.float64 else amp


def _cast(tensor: Tensor, amp: torch.dtype) -> Tensor:
    return tensor.to(_seen(tensor.dtype, amp))
