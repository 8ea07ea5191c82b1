"""Tiny random transformers models against ours: logits, gradients, and that every switch
matters."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ptx.model import LinearScaling, Llama3Scaling, ModelArgs, Transformer

ATOL = 5e-5  # logits of 3 to 6; two float32 implementations differ by 1e-5
POWER = 1e-2  # what switching anything off must at least change

RENAMES = [
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.([qk]_norm)\.", r".attention.\1."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
]

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
}


def build(case: Case) -> torch.nn.Module:
    import transformers  # takes seconds, and the ranks of other tests don't need it

    torch.manual_seed(0)
    config = getattr(transformers, f"{case.family}Config")(**{**SHAPE, **case.config})
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(mean=float(not name.endswith("bias")), std=0.3)
    return model


def rename(name: str) -> str:
    for pattern, to in RENAMES:
        name = re.sub(pattern, to, name)
    return name


def ours(model: torch.nn.Module, args: ModelArgs, *, strict: bool = True) -> Transformer:
    state = {rename(name): tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings and not args.tie_embeddings:
        del state["output.weight"]  # listed twice by transformers; an untied model has its own
    torch.manual_seed(1)
    result = Transformer(args)
    result.load_state_dict(state, strict=strict)
    return result


def tokens() -> torch.Tensor:
    return torch.randint(120, (2, 96), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_every_switch_matters(name):
    case = CASES[name]
    model, args = build(case), replace(ARGS, **case.ours)
    with torch.no_grad():
        want = model(tokens()).logits
        assert 2 < want.abs().max() < 20
        got = ours(model, args)(tokens())
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)
        for what, change in case.wrong.items():
            off = ours(model, replace(args, **change), strict=False)(tokens())
            assert (off - want).abs().max() >= POWER, what


@pytest.mark.parametrize("name", ["llama3.1", "qwen3"])
def test_gradients_equal_transformers(name):
    case = CASES[name]
    model = build(case)
    mine = ours(model, replace(ARGS, **case.ours))
    labels = tokens().roll(-1, dims=1).flatten()
    for logits in (model(tokens()).logits, mine(tokens())):
        F.cross_entropy(logits.flatten(0, 1), labels).backward()
    want = {rename(n): p.grad for n, p in model.named_parameters()}
    got = {n: p.grad for n, p in mine.named_parameters()}
    assert got.keys() == want.keys()
    for key, reference in want.items():
        scale = reference.abs().max()
        assert scale > 0
        assert (got[key] - reference).abs().max() <= 1e-5 * scale, key
