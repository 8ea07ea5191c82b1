"""Tiny random transformers models, one for each family and switch, and our arguments for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ptx.model import LinearScaling, Llama3Scaling, ModelArgs

ARGS = ModelArgs(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=120, max_seq_len=128
)
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TIED = {"tie_word_embeddings": True}
LOWER, UPPER = (True, True, False, False), (False, False, True, True)


def rope(theta: float = 1e4, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


@dataclass
class Case:
    """A transformers configuration, our arguments for it, and arguments that must not fit."""

    family: str
    config: dict[str, Any]
    ours: dict[str, Any]
    wrong: dict[str, dict[str, Any]]


CASES = {
    "llama2": Case(
        "Llama",
        {"num_key_value_heads": 4, **rope()},
        {"n_kv_heads": None},
        {"theta": {"rope_theta": 5e5}},
    ),
    "eps": Case(
        "Llama", {"rms_norm_eps": 1e-3, **rope()}, {"norm_eps": 1e-3}, {"eps": {"norm_eps": 1e-5}}
    ),
    "llama3.1": Case(
        "Llama",
        rope(
            5e5,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        {
            "rope_theta": 5e5,
            "rope_scaling": Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
            ),
        },
        {
            "scaling": {"rope_scaling": None},
            "kind": {"rope_scaling": LinearScaling(factor=8.0)},
            "band": {
                "rope_scaling": Llama3Scaling(
                    factor=8.0, low_freq_factor=1.0, high_freq_factor=1.5, original_max_position=64
                )
            },
        },
    ),
    "tied": Case(
        "Llama",
        {"tie_word_embeddings": True, **rope()},
        {"tie_embeddings": True},
        {"tie": {"tie_embeddings": False}},
    ),
    "biases": Case(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, **rope()},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"qkv": {"qkv_bias": False}, "o": {"o_bias": False}, "mlp": {"mlp_bias": False}},
    ),
    "linear": Case(
        "Llama",
        rope(rope_type="linear", factor=4.0),
        {"rope_scaling": LinearScaling(factor=4.0)},
        {"scaling": {"rope_scaling": None}},
    ),
    "mistral-window": Case(
        "Mistral",
        {"sliding_window": 16, **rope()},
        {"sliding_window": 16},
        {
            "window": {"sliding_window": None},
            "off by one": {"sliding_window": 17},
            "some layers": {"window_layers": LOWER},
        },
    ),
    "mistral-head_dim": Case(
        "Mistral", {"sliding_window": None, "head_dim": 24, **rope()}, {"head_dim": 24}, {}
    ),
    "qwen2": Case("Qwen2", rope(), {"qkv_bias": True}, {"qkv": {"qkv_bias": False}}),
    "qwen2-upper-window": Case(
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            **rope(),
        },
        {"tie_embeddings": True, "qkv_bias": True, "sliding_window": 16, "window_layers": UPPER},
        {"all": {"window_layers": None}, "lower": {"window_layers": LOWER}},
    ),
    "qwen3": Case(
        "Qwen3",
        {"tie_word_embeddings": True, "head_dim": 24, **rope(1e6)},
        {"tie_embeddings": True, "head_dim": 24, "qk_norm": True, "rope_theta": 1e6},
        {"qk_norm": {"qk_norm": False}},
    ),
    "smollm3": Case(
        "SmolLM3",
        {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1, 0], **rope()},
        {"tie_embeddings": True, "nope_layers": (False, True, False, True)},
        {"nope": {"nope_layers": None}, "layers": {"nope_layers": (True, False, True, False)}},
    ),
    "smollm3-window": Case(
        "SmolLM3",
        {
            "tie_word_embeddings": False,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
            "attention_bias": True,
            **rope(2e6),
        },
        {
            "nope_layers": (False, True, False, True),
            "sliding_window": 16,
            "window_layers": (False, True, False, True),
            "qkv_bias": True,
            "o_bias": True,
            "rope_theta": 2e6,
        },
        {"window": {"sliding_window": None, "window_layers": None}, "o": {"o_bias": False}},
    ),
    "smollm2": Case(
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, **TIED},
        {"n_heads": 3, "n_kv_heads": 1, "dim": 48, "tie_embeddings": True},
        {"tie": {"tie_embeddings": False}},
    ),
    "qwen3-window": Case(
        "Qwen3",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            **rope(),
        },
        {
            "head_dim": 24,
            "qk_norm": True,
            "qkv_bias": True,
            "o_bias": True,
            "sliding_window": 16,
            "window_layers": (False, True, True, True),
        },
        {"window": {"window_layers": None}, "qkv": {"qkv_bias": False}},
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    import transformers  # takes seconds, and the ranks of other tests don't need it

    case = CASES[name]
    return getattr(transformers, f"{case.family}Config")(**{**SHAPE, **case.config, **changes})


def build(name: str, **changes: Any) -> torch.nn.Module:
    """Norms and biases are away from 1 and 0, so that each of them matters."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"{CASES[name].family}ForCausalLM")
    model = kind(config_of(name, **changes)).eval()
    for key, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(mean=float(not key.endswith("bias")), std=0.3)
    return model


def args_of(name: str) -> ModelArgs:
    return replace(ARGS, **CASES[name].ours)


def tokens() -> torch.Tensor:
    return torch.randint(120, (2, 96), generator=torch.Generator().manual_seed(2))
