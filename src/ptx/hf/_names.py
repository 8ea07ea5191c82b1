"""The names of a model's tensors in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ptx.model import ModelArgs, Transformer

# Ours -> theirs. Renames only: both rotate channel i of a head together with channel i + half.
_OURS_TO_HF = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w1.bias": "model.layers.*.mlp.gate_proj.bias",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w2.bias": "model.layers.*.mlp.down_proj.bias",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w3.bias": "model.layers.*.mlp.up_proj.bias",
}
# Left in old checkpoints: tables that follow from the configuration.
_NOT_WEIGHTS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def hf_key(name: str) -> str:
    """``"layers.3.attention.wq.weight"`` -> ``"model.layers.3.self_attn.q_proj.weight"``.

    Raises:
        ValueError: It is no name of a parameter of `ptx.Transformer`.
    """
    number = re.search(r"(?<=^layers\.)\d+(?=\.)", name)
    pattern = name if number is None else name.replace(number[0], "*", 1)
    if pattern not in _OURS_TO_HF:
        raise ValueError(f"{name} is no parameter of ptx.Transformer, so it has no name in files")
    key = _OURS_TO_HF[pattern]
    return key if number is None else key.replace("*", number[0])


def keys_for(model: nn.Module, name: str) -> list[str]:
    """The keys under which a checkpoint may hold the tensor with this clean name, best first."""
    if isinstance(model, Transformer):
        return [hf_key(name)]
    keys = [name]
    if prefix := _base_prefix(model):
        # A model without a head from a file with one, and the other way round.
        keys.append(prefix + name if _is_body(model) else name.removeprefix(prefix))
    return list(dict.fromkeys(keys))


def tied_elsewhere(model: nn.Module, name: str) -> str | None:
    """The key of the tensor that this one is declared to be, if another part of the model has it."""
    if isinstance(model, Transformer):
        tied = name == "output.weight" and model.args.tie_embeddings
        absent = model._modules.get("tok_embeddings") is None
        return hf_key("tok_embeddings.weight") if tied and absent else None
    declared = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    shared = getattr(model, "_tied_weights_keys", None) if declared else None
    first = shared.get(name) if isinstance(shared, dict) else None
    return first if first is not None and first not in model.state_dict() else None


def keys_of_whole(model: nn.Module) -> set[str]:
    """The keys of the model that this is a part of, where it tells; else none."""
    if not isinstance(model, Transformer):
        return set()
    keys = {hf_key(name) for name in _one_layer(model.args)}
    layers = [key for key in keys if ".layers.0." in key]
    for layer in range(1, model.args.n_layers):
        keys |= {key.replace(".layers.0.", f".layers.{layer}.") for key in layers}
    return keys


def is_no_weight(model: nn.Module, key: str, keys: Iterable[str]) -> bool:
    """Whether one of the ``keys`` of a file may be passed over although no tensor takes it."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if _NOT_WEIGHTS.search(key) or any(re.search(pattern, key) for pattern in patterns):
        return True
    if not _is_body(model):
        return False
    prefix = _base_prefix(model)
    return not key.startswith(prefix) and any(other.startswith(prefix) for other in keys)


def _base_prefix(model: nn.Module) -> str:
    """``"model."``, for the models of transformers; where the one without a head is in the other."""
    prefix = getattr(model, "base_model_prefix", "") if hasattr(model, "config") else ""
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _is_body(model: nn.Module) -> bool:
    prefix = _base_prefix(model)
    return bool(prefix) and not hasattr(model, prefix[:-1])


def _one_layer(args: ModelArgs) -> list[str]:
    with torch.device("meta"):
        model = Transformer(replace(args, n_layers=1, window_layers=None, nope_layers=None))
    return [name for name, _ in model.named_parameters()]
