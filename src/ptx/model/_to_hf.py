"""Write `ModelArgs` as a transformers configuration."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ptx.model._args import Llama3Scaling, ModelArgs
from ptx.model._from_hf import FAMILIES, FULL, SLIDING, args_from_hf

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def hf_config(args: ModelArgs) -> dict[str, Any]:
    """The ``config.json`` of the transformers model that computes what a `Transformer` does.

    RoPE is spelled in the way that transformers 4 and 5 both read.

    Args:
        args: Read back by `ModelArgs.from_hf` they are the same, but for widths left at None.

    Raises:
        ValueError: No model of transformers has these switches together.
    """
    wanted = _spelled_out(args)
    for model_type in FAMILIES:
        config = _config(model_type, wanted)
        try:
            read = args_from_hf(config)
        except ValueError:
            continue
        # transformers' LlamaConfig refuses such a dim, whatever head_dim says
        if read == wanted and not (model_type == "llama" and args.dim % args.n_heads):
            return config
    switches = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "sliding_window", "window_layers")
    found = ", ".join(f"{name}={getattr(args, name)!r}" for name in (*switches, "nope_layers"))
    raise ValueError(
        f"hf_config: no model of {', '.join(FAMILIES)} has these switches together: {found}"
    )


def _spelled_out(args: ModelArgs) -> ModelArgs:
    windows, nope = args.window_layers, args.nope_layers
    if windows is not None and all(windows):
        windows = None
    window = args.sliding_window
    if windows is not None and not any(windows):
        window = windows = None
    return replace(
        args,
        n_kv_heads=args.kv_heads,
        head_dim=args.head_width,
        hidden_dim=args.ffn_width,
        multiple_of=256,
        ffn_dim_multiplier=None,
        rope_theta=float(args.rope_theta),
        sliding_window=window,
        window_layers=windows,
        nope_layers=nope if nope is not None and any(nope) else None,
    )


def _config(model_type: str, args: ModelArgs) -> dict[str, Any]:
    family = FAMILIES[model_type]
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": args.head_width,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": 0.02,
        "intermediate_size": args.ffn_width,
        "max_position_embeddings": args.max_seq_len,
        "model_type": model_type,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": args.norm_eps,
        "rope_scaling": _rope_scaling(args),
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tie_embeddings,
        "use_cache": True,
        "vocab_size": args.vocab_size,
    }
    if family.attention_bias:
        config["attention_bias"] = args.o_bias
    if family.mlp_bias:
        config["mlp_bias"] = args.mlp_bias
    layers = range(args.n_layers)
    if family.nope:
        config["no_rope_layers"] = [int(args.uses_rope(layer)) for layer in layers]
    if family.layer_types:
        windowed = [args.window(layer) is not None for layer in layers]
        config["use_sliding_window"] = any(windowed)
        config["layer_types"] = [SLIDING if flag else FULL for flag in windowed]
        # What transformers read before it knew layer_types.
        config["max_window_layers"] = windowed.index(True) if any(windowed) else args.n_layers
    if family.layer_types or family.window is not None:
        config["sliding_window"] = args.sliding_window
    return config


def _rope_scaling(args: ModelArgs) -> dict[str, Any] | None:
    scaling = args.rope_scaling
    if scaling is None:
        return None
    if not isinstance(scaling, Llama3Scaling):
        return {"rope_type": "linear", **asdict(scaling)}
    numbers = asdict(scaling)
    original = numbers.pop("original_max_position")
    return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}
