"""RMSNorm with float32 statistics and the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dim, then multiplies by ``weight``.

    Statistics and the product with the weight are float32, rounded **once** to the input's dtype.
    Transformers rounds before the product as well, so bfloat16 outputs differ from it by one unit
    in about a quarter of the elements; this form is the closer one to float32.

    Works on any layout that ``F.rms_norm`` takes, DTensors included (sequence parallel).

    Args:
        dim: Size of the last dim.
        eps: Added to the mean square. No default: torch's own (1.2e-7) is no model's.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], same dtype."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # float32 weights, bfloat16 stream: given both, torch warns and forgoes its fused kernel.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
