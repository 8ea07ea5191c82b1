"""Token weights over ranks and batches: one scale to train with, one mean to report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptx._checks import can_read
from ptx.loss._arguments import device_errors, mesh_errors, size_errors
from ptx.loss._labels import class_ids, out_of_range, range_message
from ptx.loss._options import LossOptions

MESH = "the 1-D mesh of the ranks with different tokens: pass loss_mesh(mesh)"


def token_scale(
    labels: Tensor | Sequence[Tensor],
    mesh: DeviceMesh,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Tensor:
    """What to multiply a ``reduction="sum"`` loss by, so that each token of a step weighs the same.

    FSDP averages gradients over its ranks. With ``loss_sum * scale`` on each rank and micro-batch,
    that average is the gradient of the mean loss over all kept tokens of the step, however unevenly
    they lie::

        scale = mesh.size() / max(1, kept tokens over the mesh and the whole window)

    Call it once per optimizer step, on every rank of ``mesh`` (under pipeline parallelism only on
    the last stages). The loss to log is the mean over ``mesh`` of loss times scale.

    Args:
        labels: [...] of any integer dtype, as given to the loss (already shifted); or the list of
            all micro-batches that are accumulated into one step.
        mesh: 1-D mesh of the ranks with different tokens, ``loss_mesh(mesh)``. tp ranks aren't in
            it, as they share theirs.
        ignore_index: The label that isn't counted.
        vocab_size: If given, a label outside [0, vocab_size) on any rank raises on all of them; the
            loss alone would raise on that rank and leave the others waiting.

    Returns:
        float32 scalar tensor on the labels' device, equal on every rank; no sync on accelerators.

    Raises:
        ValueError: A mesh that isn't 1-D, no labels, a DTensor, labels that aren't integers; a bad
            label if vocab_size is given (on accelerators: a device-side assertion).

    Cost: one all-reduce of one int64, or of two with vocab_size.

    Source: https://github.com/pytorch/torchtitan/pull/2206,
    https://github.com/huggingface/transformers/pull/34373.
    """
    if not isinstance(labels, Tensor | Iterable):
        raise ValueError(
            f"token_scale: labels are a {type(labels).__name__}; pass a tensor or a list"
        )
    window = [labels] if isinstance(labels, Tensor) else list(labels)
    sizes = [] if vocab_size is None else size_errors("vocab_size", vocab_size)
    LossOptions(ignore_index).checked("token_scale", [*sizes, *mesh_errors(mesh, MESH)])
    if not window:
        raise ValueError("token_scale: labels are an empty list; pass those of every micro-batch")
    for part in window:
        if not isinstance(part, Tensor):
            raise ValueError(
                f"token_scale: labels hold a {type(part).__name__}; pass a tensor, or a flat list of"
                " the tensors of a window"
            )
        if isinstance(part, DTensor):
            raise ValueError(
                f"token_scale: labels are a DTensor with placements {part.placements}; pass the"
                " plain tensor that this rank's loss sees"
            )
    if wrong := device_errors(**{f"labels[{i}]": part for i, part in enumerate(window)}):
        raise ValueError(f"token_scale: {wrong[0]}")
    window = [class_ids(part, "token_scale") for part in window]
    counts = [torch.stack([(part != ignore_index).sum() for part in window]).sum()]
    if vocab_size is not None:
        bad = [out_of_range(part, vocab_size, ignore_index).sum() for part in window]
        counts.append(torch.stack(bad).sum())
    totals = torch.stack(counts)
    _sum_over(totals, mesh)
    if vocab_size is not None:
        message = range_message(vocab_size, ignore_index, "token_scale")
        _require_none(totals[1], counts[1], message)
    return (mesh.size() / totals[0].clamp(min=1).double()).float()


def token_mean(
    loss_sum: Tensor | float | Sequence[Tensor | float],
    count: Tensor | float | Sequence[Tensor | float],
    mesh: DeviceMesh,
) -> Tensor:
    """Mean loss per token over ranks and batches, to report: sum of the sums / sum of the counts.

    A mean of the batches' means would give the tokens of a short last batch more weight.

    Args:
        loss_sum: Sums of token losses (``reduction="sum"``): a tensor of any shape, a number, or a
            list of either, one per batch. Ranks may bring different numbers of batches.
        count: The numbers of tokens they were summed over, in any of these forms.
        mesh: 1-D mesh of the ranks with different tokens, ``loss_mesh(mesh)``.

    Returns:
        float32 scalar tensor, equal on every rank, without gradient; 0 if nothing was counted.

    Raises:
        ValueError: A mesh that isn't 1-D, a DTensor, or what isn't a number.

    Cost: one all-reduce of two float64; summed in float64.

    Source: https://github.com/pytorch/torchtitan/pull/4167.
    """
    values, counts = _as_list(loss_sum), _as_list(count)
    wrong = mesh_errors(mesh, MESH)
    for name, parts in (("loss_sum", values), ("count", counts)):
        for part in parts:
            if isinstance(part, DTensor) or not isinstance(part, Tensor | int | float):
                wrong.append(
                    f"{name} holds a {type(part).__name__}, not a plain tensor or a number"
                )
            elif isinstance(part, Tensor) and part.is_complex():
                wrong.append(f"{name} holds complex numbers")
    if wrong:
        raise ValueError(f"token_mean: {'; '.join(wrong)}")
    tensors = [part for part in values + counts if isinstance(part, Tensor)]
    device = tensors[0].device if tensors else torch.device(mesh.device_type)
    totals = torch.stack([_total(values, device), _total(counts, device)])
    _sum_over(totals, mesh)
    total, tokens = totals.unbind()
    # Not clamp(min=1): counts may be weights that sum to less than 1.
    return (total / tokens.masked_fill(tokens == 0, 1.0)).float()


def _sum_over(counts: Tensor, mesh: DeviceMesh) -> None:
    if mesh.size() > 1:
        dist.all_reduce(counts, group=mesh.get_group())


def _require_none(bad: Tensor, mine: Tensor, message: str) -> None:
    if not can_read(bad):
        torch._assert_async(bad == 0, message)
    elif bad:
        raise ValueError(f"{message}; {int(bad)} are not, {int(mine)} of them on this rank")


def _as_list(values: object) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values]
    return [number for value in values for number in _as_list(value)]


def _total(values: list[Tensor | float], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value in values:
        total += torch.as_tensor(value, dtype=torch.float64, device=device).detach().sum()
    return total
