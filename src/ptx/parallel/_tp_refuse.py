"""Say what in a model that has no tensor-parallel plan stands against splitting it."""

from __future__ import annotations

import re

from torch import nn

from ptx._names import clean_named_modules

_FUSED = re.compile(
    r"qkv(_proj)?|q_k_v_proj|W_?qkv|query_key_value|c_attn|kqv|gate_up_proj|dense_h_to_4h_gate"
)
_LATENT = re.compile(r"(q|kv)_a_(proj|layernorm)(_with_mqa)?|kv_b_proj|q_b_proj")
_EXPERTS = re.compile(r"experts?|shared_experts?|router|block_sparse_moe|moe")
_HEAD_NORM = re.compile(r"(q|k|query|key)_(layer)?norm|(q|k)_ln")


def whole_matrix_reason(model: nn.Module) -> str | None:
    """The first thing that can't be cut between features, in words; None: nothing known is there.

    Shapes fit all the same, so that a plan of columns and rows would train something else.
    """
    for name, module in clean_named_modules(model):
        leaf = name.rpartition(".")[2]
        glob = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if type(module).__name__ == "Conv1D":
            return (
                f"{glob} is a Conv1D, whose weight is transposed: torch's styles would cut it wrong"
            )
        if _FUSED.fullmatch(leaf):
            return (
                f"{glob} is several matrices in one: cut by rows, a rank would have all of the first"
                " and none of the last"
            )
        if _LATENT.fullmatch(leaf):
            return f"{glob} compresses all heads into one latent vector, which heads don't split"
        if _EXPERTS.fullmatch(leaf):
            return f"{glob} is a mixture of experts, routed by token"
        if _HEAD_NORM.fullmatch(leaf) and _spans_heads(module, model):
            return f"{glob} normalises over all heads at once, of which a rank has some"
    return None


def _spans_heads(norm: nn.Module, model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    width = getattr(config, "head_dim", None) or (hidden and heads and hidden // heads)
    weight = getattr(norm, "weight", None)
    return weight is not None and width is not None and weight.numel() != width
