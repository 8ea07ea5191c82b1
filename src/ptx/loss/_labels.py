"""Labels as the losses take them: checked before anything is computed or communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ptx._checks import refuse_where


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
    ids = class_ids(labels, where).reshape(-1)
    # Tokens that were generated in inference mode: autograd can only keep a copy.
    is_inference = not torch.compiler.is_compiling() and ids.is_inference()
    return ids.clone() if is_inference else ids


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
    """Refuse labels that are neither a class nor ignored, before any collective."""
    bad = out_of_range(labels, vocab_size, ignore_index)
    refuse_where(bad, labels, range_message(vocab_size, ignore_index, where))


def range_message(vocab_size: int, ignore_index: int, where: str) -> str:
    return (
        f"{where}: labels must be in [0, {vocab_size}) or ignore_index={ignore_index}"
        " (is the tokenizer larger than the vocabulary of the model?)"
    )
