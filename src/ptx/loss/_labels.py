"""Labels as the losses take them: checked before anything is computed or communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def flat_labels(labels: Tensor, shape: Sequence[int], where: str) -> Tensor:
    """``labels`` as a plain int64 tensor [N]; ``shape`` is the logits' without their last dim.

    Raises:
        ValueError: A sharded DTensor, a dtype that isn't integer, or another shape.
    """
    if isinstance(labels, DTensor):
        if not all(isinstance(placement, Replicate) for placement in labels.placements):
            raise ValueError(
                f"{where}: labels are a DTensor with placements {labels.placements}, but every rank"
                " needs all of them; pass the plain tensor, or redistribute to Replicate() first"
            )
        labels = labels.to_local()
    if labels.shape != torch.Size(shape):
        raise ValueError(
            f"{where}: labels {tuple(labels.shape)} must match logits without their last dim,"
            f" {tuple(shape)}; shift or slice both the same way before calling"
        )
    return class_ids(labels, where).reshape(-1)


def class_ids(labels: Tensor, where: str) -> Tensor:
    """``labels`` as int64, as -100 is another number in unsigned dtypes."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"{where}: labels are {labels.dtype}, they must be class ids of an integer dtype"
        )
    return labels.long()


def out_of_range(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Bool like ``labels``: neither a class nor ignored."""
    return ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)


def require_classes(labels: Tensor, vocab_size: int, ignore_index: int, where: str) -> None:
    """Refuse labels that are neither a class nor ignored, before any collective.

    ValueError on CPU. On accelerators, under ``torch.compile`` and for fake tensors a value can't
    be read without a sync (or at all), so there it is an assertion on the device.
    """
    bad = out_of_range(labels, vocab_size, ignore_index)
    if not can_read(labels):
        # Private, but the one assertion that doesn't wait for the device.
        torch._assert_async(~bad.any(), range_message(vocab_size, ignore_index, where))
    elif bad.any():
        values = labels[bad]
        raise ValueError(
            f"{range_message(vocab_size, ignore_index, where)}; {values.numel()} of"
            f" {labels.numel()} are not, the first is {int(values[0])}"
        )


def range_message(vocab_size: int, ignore_index: int, where: str) -> str:
    return (
        f"{where}: labels must be in [0, {vocab_size}) or ignore_index={ignore_index}"
        " (is the tokenizer larger than the vocabulary of the model?)"
    )


def can_read(tensor: Tensor) -> bool:
    """Whether a value can be read at no cost: a real tensor on CPU, outside a compiler."""
    # Fake and functional tensors are subclasses; there is no public way to ask.
    is_real = tensor.device.type == "cpu" and type(tensor) is Tensor
    return is_real and not torch.compiler.is_compiling()
