"""Transformers configurations become our arguments and back, or are refused by field and value."""

import json
from dataclasses import replace

import pytest
import torch

from model.families import CASES, args_of, build, config_of, tokens
from model.test_parity import ours
from ptx.model import LinearScaling, Llama3Scaling, ModelArgs, Transformer
from ptx.model._to_hf import _spelled_out, hf_config

ATOL = 5e-5  # logits of 3 to 6; two float32 implementations differ by 1e-5
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 120,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_gives_the_arguments_of_equal_logits(name, tmp_path):
    model = build(name)
    args = ModelArgs.from_hf(model.config)
    assert _spelled_out(args) == _spelled_out(args_of(name))
    model.config.save_pretrained(tmp_path)
    assert ModelArgs.from_hf(tmp_path) == args
    assert ModelArgs.from_hf(str(tmp_path / "config.json")) == args
    assert ModelArgs.from_hf(json.loads((tmp_path / "config.json").read_text())) == args
    with torch.no_grad():
        torch.testing.assert_close(
            ours(model, args)(tokens()), model(tokens()).logits, atol=ATOL, rtol=0
        )


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_we_write_is_read_by_transformers_and_by_us(name):
    args = _spelled_out(args_of(name))
    written = hf_config(args)
    assert ModelArgs.from_hf(written) == args
    # The same weights in the model that transformers builds from it have the same logits.
    import transformers

    model = build(name)
    kind = getattr(transformers, written["architectures"][0])
    again = kind(kind.config_class(**written)).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_C13_head_dim_of_the_configuration_wins_and_is_exported():
    config = {
        **LLAMA,
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
    }
    with torch.device("meta"):
        attention = Transformer(ModelArgs.from_hf(config)).layers["0"].attention
    assert attention.wq.weight.shape == (4096, 2560)
    assert attention.wk.weight.shape == attention.wv.weight.shape == (8 * 128, 2560)
    assert attention.wo.weight.shape == (2560, 4096)
    assert hf_config(ModelArgs.from_hf(config))["head_dim"] == 128
    assert ModelArgs.from_hf({**LLAMA, "head_dim": None}).head_width == 16


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_both_spellings_of_rope(spelling):
    args = ModelArgs.from_hf({**LLAMA, **spelling})
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    assert (args.rope_theta, args.rope_scaling) == (5e5, scaling)
    linear = {"rope_scaling": {"type": "linear", "factor": 2}}
    assert ModelArgs.from_hf({**LLAMA, **linear}).rope_scaling == LinearScaling(factor=2.0)


def test_absent_fields_have_the_values_of_transformers():
    from transformers import AutoConfig

    for model_type in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        config = {**LLAMA, "model_type": model_type, "hidden_size": 128, "num_attention_heads": 32}
        full = AutoConfig.for_model(**config)
        want = _spelled_out(ModelArgs.from_hf(full))
        assert _spelled_out(ModelArgs.from_hf(config)) == want, model_type
    assert ModelArgs.from_hf({**LLAMA, "model_type": "mistral", "num_key_value_heads": 4}) == (
        ModelArgs.from_hf(
            {**LLAMA, "model_type": "mistral", "num_key_value_heads": None, "sliding_window": 4096}
        )
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2' isn't one of llama, mistral, qwen2"),
        ({"model_type": None}, "model_type=None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' without factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "attention_factor": 2.0}},
            "rope_type='llama3' with attention_factor=2.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters={'full_attention'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "rope_theta is given as"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "disagree",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', only 'silu' or 'swish'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method'"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256 isn't known"),
        ({"num_local_experts": 8}, "num_local_experts=8 isn't known"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 2}, "layer_types="),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
    ],
)
def test_what_is_not_understood_raises_with_field_and_value(change, said):
    with pytest.raises(ValueError, match=r"ModelArgs\.from_hf") as error:
        ModelArgs.from_hf({**LLAMA, **change})
    assert said in str(error.value)


def test_everything_wrong_is_listed_at_once():
    with pytest.raises(ValueError, match="this llama is more than ptx computes") as error:
        ModelArgs.from_hf({**LLAMA, "hidden_act": "gelu", "n_experts": 4, "attention_dropout": 0.5})
    assert len(str(error.value).splitlines()) == 4


def test_what_is_no_configuration(tmp_path):
    for config in ("org/name", tmp_path, 3):
        with pytest.raises(ValueError, match=r"ModelArgs\.from_hf"):
            ModelArgs.from_hf(config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        ModelArgs.from_hf(tmp_path)


def test_switches_that_no_family_has_together():
    args = replace(args_of("qwen3"), mlp_bias=True)
    with pytest.raises(ValueError, match=r"has these switches together: .*mlp_bias=True"):
        hf_config(args)


def test_every_field_of_a_configuration_object_is_decided_on():
    """Nothing that transformers adds to these configurations passes unnoticed."""
    for name in CASES:
        config = config_of(name).to_dict()
        with pytest.raises(ValueError, match="new_field=1"):
            ModelArgs.from_hf({**config, "new_field": 1})
