"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ptx
from losses import LossSum


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], loss_sum: LossSum, mesh: DeviceMesh
) -> float:
    """Mean loss over the tokens of all ranks' ``batches``, each token counted once."""
    total = torch.zeros((), device=mesh.device_type)
    count = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
    for tokens, labels in batches:
        tokens, labels = tokens.to(mesh.device_type), labels.to(mesh.device_type)
        total += loss_sum(model, tokens, labels)
        count += (labels != -100).sum()
    return ptx.token_mean(total, count, ptx.loss_mesh(mesh)).item()
