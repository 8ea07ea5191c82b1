"""The options every loss shares, and the few lines of maths that give them one meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Self, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class LossOptions:
    """What the loss of one token is, and how tokens are summed.

    With x = softcap(logit_scale * logits), softcap(a) = softcap * tanh(a / softcap), V classes and
    log p = x - lse(x), the loss of a token with label y is::

        -(1 - label_smoothing) * log p[y] - label_smoothing / V * sum(log p) + z_loss * lse(x)**2

    That is torch's convention for smoothing. A token whose label is ``ignore_index`` adds neither
    loss nor gradient. Maths and loss are float32 whatever the dtype of the logits, except that
    float64 stays float64.

    Args:
        ignore_index: Label of tokens to leave out.
        reduction: "mean" divides the sum by the number of kept tokens (by 1 if there are none),
            "sum" doesn't divide, "none" gives one value per label, 0 where it is ignored.
        label_smoothing: In [0, 1].
        z_loss: Weight of the squared log-partition, at least 0.
        softcap: Positive, or None for no cap.
        logit_scale: Positive; 1 / temperature.
    """

    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def checked(self, where: str, also: Sequence[str] = ()) -> Self:
        """Itself, or a ValueError of the function ``where`` that lists every value out of range.

        ``also``: what else is wrong with the call.
        """
        wrong = []
        is_int = isinstance(self.ignore_index, int) and not isinstance(self.ignore_index, bool)
        if not (is_int and -(2**63) <= self.ignore_index < 2**63):
            wrong.append(f"ignore_index={self.ignore_index!r} must be an int of 64 bits")
        if self.reduction not in get_args(Reduction):
            wrong.append(f"reduction={self.reduction!r} must be one of {get_args(Reduction)}")
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            wrong.append(f"label_smoothing={self.label_smoothing!r} must be a number in [0, 1]")
        if not (is_number(self.z_loss) and 0 <= self.z_loss < inf):
            wrong.append(f"z_loss={self.z_loss!r} must be a finite number >= 0 (0 switches it off)")
        if self.softcap is not None and not (is_number(self.softcap) and 0 < self.softcap < inf):
            wrong.append(f"softcap={self.softcap!r} must be a finite number > 0, or None (no cap)")
        if not (is_number(self.logit_scale) and 0 < self.logit_scale < inf):
            wrong.append(f"logit_scale={self.logit_scale!r} must be a finite number > 0")
        if wrong := [*wrong, *also]:
            raise ValueError(f"{where}: {'; '.join(wrong)}")
        return self


def chunk_errors(chunk_tokens: int | None) -> list[str]:
    """What is wrong with a number of rows, if anything is."""
    is_int = isinstance(chunk_tokens, int) and not isinstance(chunk_tokens, bool)
    if chunk_tokens is None or (is_int and chunk_tokens >= 1):
        return []
    return [f"chunk_tokens={chunk_tokens!r} must be an int >= 1, or None"]


def shape_logits(logits: Tensor, options: LossOptions) -> Tensor:
    """The x of `LossOptions`, in the loss's dtype; not a copy where nothing changes."""
    x = logits.to(loss_dtype(logits.dtype))
    if options.logit_scale != 1.0:
        x = x * options.logit_scale
    if options.softcap is not None:
        x = torch.tanh(x / options.softcap) * options.softcap
    return x


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that losses of logits of ``dtype`` are computed and returned in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduce_tokens(losses: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """``losses``, one per label and 0 where ignored, as ``options.reduction`` says."""
    if options.reduction == "none":
        return losses
    if options.reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != options.ignore_index).sum().clamp(min=1)


def is_number(value: object) -> bool:
    # A tensor would be read back from its device here, and would silently get no gradient later.
    return isinstance(value, int | float) and not isinstance(value, bool)
