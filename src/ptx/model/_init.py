"""How a Transformer's parameters are allocated and first drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from ptx._names import clean_name
from ptx.model._norm import RMSNorm

STD = 0.02
OUTPUT_CUTOFF = 3.0  # standard deviations

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


def uninitialised(make: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """Makes a module with allocated, unfilled parameters on the default device.

    torch's layers draw their own initial values, which `init_parameters` would draw over: half of
    the time that building a large model takes.
    """
    with torch.device("meta"):
        module = make(*args, **kwargs)
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
    return module


def init_parameters(model: nn.Module, *, n_layers: int, tied: bool) -> None:
    """Draws every parameter that the model, or a part of it, has.

    Linear layers and the embedding: normal, standard deviation 0.02. Those that write to the
    residual stream (wo, w2): smaller by sqrt(2 * n_layers), the number of such writes in the
    **whole** model, so that the stream's variance at the end doesn't grow with depth and every
    layer is drawn alike (a part of a pipeline needs no layer numbers). Norms one, biases zero.

    The output: normal with standard deviation dim ** -0.5, cut at 3 of them, so that logits start
    with unit variance whatever the width. A tied output is the embedding.

    Only ``nn.init`` functions on whole parameters, each parameter once: `ptx.materialize` swaps
    those for draws that don't depend on how a parameter is sharded.

    Source: depth scaling: Radford et al., GPT-2 report, section 2.3.
    """
    residual_std = STD / (2 * n_layers) ** 0.5
    drawn: set[int] = set()
    for wrapped_name, module in model.named_modules():
        name = clean_name(wrapped_name)
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if id(module.weight) not in drawn:
            drawn.add(id(module.weight))
            if name == "output" and not tied:
                std = module.weight.shape[1] ** -0.5
                cutoff = OUTPUT_CUTOFF * std
                nn.init.trunc_normal_(module.weight, 0.0, std, -cutoff, cutoff)
            else:
                residual = name.endswith((".wo", ".w2"))
                nn.init.normal_(module.weight, 0.0, residual_std if residual else STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
