import re

import pytest
import torch
import transformers
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import LlamaConfig, LlamaForCausalLM

from ptx.model import ModelArgs, Transformer
from ptx.parallel._tp_check import check_plan
from ptx.parallel._tp_plan import tp_plan
from ptx.parallel._tp_styles import HeadParallel, Replicated

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=13)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 13}

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")


def config_of(name):
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return getattr(transformers, f"{name}Config")(**SMALL, **special, num_key_value_heads=2)


def on_meta(build, *args):
    with torch.device("meta"):
        return build(*args)


def test_a_plan_is_globs_and_styles_that_print():
    plan = tp_plan(on_meta(Transformer, ARGS))
    assert list(plan) == [
        "tok_embeddings",
        "layers.*.attention_norm",
        "layers.*.attention",
        "layers.*.attention.wq",
        "layers.*.attention.wk",
        "layers.*.attention.wv",
        "layers.*.attention.wo",
        "layers.*.ffn_norm",
        "layers.*.feed_forward",
        "layers.*.feed_forward.w1",
        "layers.*.feed_forward.w3",
        "layers.*.feed_forward.w2",
        "norm",
        "output",
    ]
    assert repr(plan["layers.*.attention.wk"]) == "HeadParallel(heads=2, replicate=True)"
    for model in (on_meta(Transformer, ARGS), on_meta(LlamaForCausalLM, LlamaConfig(**SMALL))):
        for sequence_parallel in (True, False):
            plan = tp_plan(model, sequence_parallel=sequence_parallel)
            assert all(isinstance(style, ParallelStyle) for style in plan.values())
            assert " object at 0x" not in repr(plan)


def test_without_sequence_parallelism_nothing_is_split_over_the_sequence():
    for model in (on_meta(Transformer, ARGS), on_meta(LlamaForCausalLM, LlamaConfig(**SMALL))):
        assert repr(Shard(1)) in repr(tp_plan(model))
        plan = tp_plan(model, sequence_parallel=False)
        assert repr(Shard(1)) not in repr(plan)
        norms = [style for key, style in plan.items() if "norm" in key]
        assert len(norms) == 3
        assert all(isinstance(style, Replicated) for style in norms)


def test_whole_attention_splits_the_rest_and_fits_any_number_of_heads():
    odd = ModelArgs(dim=18, n_layers=1, n_heads=3, vocab_size=13, hidden_dim=8)
    small = SMALL | {"hidden_size": 18, "num_attention_heads": 3, "intermediate_size": 8}
    for model in (
        on_meta(Transformer, odd),
        on_meta(LlamaForCausalLM, LlamaConfig(**small, num_key_value_heads=3)),
    ):
        _, problems = check_plan(model, tp_plan(model), 2)
        assert len(problems) == 3
        assert all("keep attention whole" in problem for problem in problems)
        plan = tp_plan(model, whole_attention=True)
        assert check_plan(model, plan, 2)[1] == []
        kept = [key for key, style in plan.items() if isinstance(style, Replicated)]
        assert len(kept) == 4
        assert all("attn" in key or "attention" in key for key in kept)
        assert tp_plan(model).keys() == plan.keys()


def test_a_part_of_a_model_has_a_plan_of_its_modules():
    model = on_meta(Transformer, ARGS)
    model.tok_embeddings = model.output = None
    del model.layers["0"]
    plan = tp_plan(model)
    assert "norm" in plan
    assert "layers.*.attention.wq" in plan
    assert not plan.keys() & {"tok_embeddings", "output"}
    model.layers.clear()
    assert list(tp_plan(model)) == ["norm"]


def test_transformers_models_and_subclasses():
    class Mine(LlamaForCausalLM):
        pass

    model = on_meta(Mine, LlamaConfig(**SMALL, num_key_value_heads=2))
    plan, body = tp_plan(model), tp_plan(model.model)
    assert {key.removeprefix("model.") for key in plan} - {"lm_head", "model"} == body.keys()
    assert isinstance(style := plan["model.layers.*.self_attn.k_proj"], HeadParallel)
    assert (style.heads, style.replicate) == (2, True)


def test_the_plan_splits_what_transformers_own_plan_splits():
    """Theirs gathers in other places, and leaves the norms whole."""
    own = {
        "colwise": (ColwiseParallel, HeadParallel),
        "colwise_gather_output": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": RowwiseParallel,
        "replicated_with_grad_allreduce": SequenceParallel,
    }
    for name in FAMILIES:
        model = on_meta(getattr(transformers, f"{name}ForCausalLM"), config_of(name))
        plan, theirs = tp_plan(model), model.tp_plan
        assert {key.removesuffix(".weight") for key in theirs} <= plan.keys()
        for key, kind in theirs.items():
            assert isinstance(plan[key], own[kind]), (name, key)
        named = model.named_parameters(remove_duplicate=False)
        matrices = [name.removesuffix(".weight") for name, p in named if p.ndim == 2]
        split = {re.sub(r"\d+", "*", name) for name in matrices}
        assert split == {key for key, kind in theirs.items() if "wise" in kind}, name


def test_unknown_models_are_refused_by_name():
    class LlamaForCausalLM(torch.nn.Linear):  # not transformers'
        pass

    for model in (
        on_meta(transformers.GemmaForCausalLM, transformers.GemmaConfig(**SMALL)),
        LlamaForCausalLM(2, 2),
    ):
        name = type(model).__name__
        with pytest.raises(
            ValueError, match=rf"no plan for {name}, only for ptx.Transformer and .*plan="
        ):
            tp_plan(model)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", r"transformer\.h\.\*\.attn\.c_attn is a Conv1D"),
        ("phi3", r"model\.layers\.\*\.self_attn\.qkv_proj is several matrices in one"),
        ("glm4", r"model\.layers\.\*\.mlp\.gate_up_proj is several matrices in one"),
        ("gpt_neox", r"attention\.query_key_value is several matrices in one"),
        ("olmo2", r"model\.layers\.\*\.self_attn\.q_norm normalises over all heads at once"),
        ("mixtral", r"model\.layers\.\*\.mlp\.experts is a mixture of experts"),
        ("gpt_oss", r"model\.layers\.\*\.mlp\.router is a mixture of experts"),
        ("deepseek_v3", r"self_attn\.q_a_proj compresses all heads into one latent vector"),
    ],
)
def test_what_cannot_be_split_exactly_is_refused_with_the_reason(model_type, reason):
    config = transformers.AutoConfig.for_model(
        model_type, **SMALL, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    model = on_meta(transformers.AutoModelForCausalLM.from_config, config)
    with pytest.raises(ValueError, match=rf"tp_plan: no plan for \w+ \(.*{reason}"):
        tp_plan(model)


def test_a_fused_matrix_in_a_known_model_is_not_covered():
    model = on_meta(LlamaForCausalLM, LlamaConfig(**SMALL))
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = torch.nn.Linear(16, 48, device="meta")
    del attention.q_proj, attention.k_proj, attention.v_proj
    _, problems = check_plan(model, tp_plan(model), 2)
    assert len(problems) == 1
    assert problems[0].startswith("no key covers model.layers.*.self_attn.qkv_proj.weight")
