"""The ways to compute the one loss: the sum of the cross-entropies of a batch's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ptx

LossName = Literal[
    "fused-linear",
    "eager",
    "chunked",
    "compiled",
    "vocab-parallel",
    "chunked-backward",  # another name of chunked
    "loss-parallel",  # another name of vocab-parallel
]
LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, tokens, labels) -> scalar


def make_loss(name: LossName, mesh: DeviceMesh, vocab_size: int) -> LossSum:
    """Any of them works on any mesh, and gives the same numbers; memory and speed differ."""
    if name == "fused-linear":  # the logits of all tokens never exist
        return lambda model, tokens, labels: ptx.fused_linear_ce(
            model(tokens, return_hidden=True), model.output, labels, reduction="sum"
        )
    if name in ("vocab-parallel", "loss-parallel"):
        return lambda model, tokens, labels: ptx.vocab_parallel_ce(
            model(tokens), labels, mesh["tp"], vocab_size=vocab_size, reduction="sum"
        )
    of_logits: Callable[..., Tensor] = ptx.cross_entropy
    if name == "compiled":
        of_logits = torch.compile(ptx.cross_entropy)
    elif name in ("chunked", "chunked-backward"):  # a few tokens' temporaries at a time
        of_logits = ptx.chunked_ce
    return lambda model, tokens, labels: of_logits(model(tokens), labels, reduction="sum")
