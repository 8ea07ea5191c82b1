"""Refuse bad values without waiting for an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_where(bad: Tensor, values: Tensor, message: str) -> None:
    """Raise if any of ``values`` is marked in ``bad``, a bool tensor of the same shape.

    ValueError on CPU. On accelerators, under ``torch.compile`` and for fake tensors a value can't
    be read without a sync (or at all), so there it is an assertion on the device.
    """
    if not can_read(values):
        # Private, but the one assertion that doesn't wait for the device.
        torch._assert_async(~bad.any(), message)
    elif bad.any():
        found = values[bad]
        raise ValueError(
            f"{message}; {found.numel()} of {values.numel()} are not, the first is {int(found[0])}"
        )


def can_read(tensor: Tensor) -> bool:
    """Whether a value can be read at no cost: a real tensor on CPU, outside a compiler."""
    # Fake and functional tensors are subclasses; there is no public way to ask.
    is_real = tensor.device.type == "cpu" and type(tensor) is Tensor
    return is_real and not torch.compiler.is_compiling()
