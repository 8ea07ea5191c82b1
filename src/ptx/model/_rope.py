"""Rotary position embedding: float32 tables from positions, and the half-split rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ptx.model._args import LinearScaling, ModelArgs, RopeScaling


class Rope:
    """Cosines and sines of one forward: [S, head_dim / 2] or [B, S, head_dim / 2], float32.

    Deliberately no tuple and no dataclass: FSDP2's ``cast_forward_inputs`` rounds every float
    tensor that it finds in those to the parameters' dtype, and a block must receive float32 tables.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


def rope_tables(args: ModelArgs, positions: Tensor) -> Rope:
    """Tables for these positions, computed anew in every forward.

    No module holds a table or a frequency. So nothing is garbage after meta init and ``to_empty``,
    ``model.to(bfloat16)`` and the default dtype can't round anything, no length is fixed, and all
    operands are made on the positions' device: no copy from the host, no synchronisation. The cost,
    S * head_dim / 2 cosines and sines a forward, is nothing beside a single layer.

    Args:
        args: Head width, theta and scaling.
        positions: [S] or [B, S], any integer dtype.
    """
    frequencies = inverse_frequencies(args, positions.device)
    # A product, not a matmul: autocast would run a matmul in bfloat16.
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return Rope(angles.cos(), angles.sin())


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotates channel i of each head together with channel i + head_dim / 2.

    This pairing is the one of transformers' checkpoints; the original Llama rotates neighbours,
    with the rows of wq and wk permuted to match.

    Args:
        x: [B, S, heads, head_dim], any float dtype. The rotation itself is float32 or wider.
        rope: Tables of the same S.

    Returns:
        [B, S, heads, head_dim] in x's dtype.

    Source: Su et al., arXiv:2104.09864.
    """
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)  # one head dim to broadcast over
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def inverse_frequencies(args: ModelArgs, device: torch.device) -> Tensor:
    """Radians per position of each channel pair: [head_dim / 2], float32."""
    width = args.head_width
    # Stated dtypes: the default dtype may be bfloat16.
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / (args.rope_theta**exponents)
    return frequencies if args.rope_scaling is None else _scaled(frequencies, args.rope_scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    # Clamped, without a branch on values: this also runs on meta and fake tensors. The blend is
    # exact at both ends, since one of its terms is then zero.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
