import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ptx.model import ModelArgs, Transformer
from ptx.parallel._tp_plan import tp_plan
from ptx.parallel._tp_styles import HeadParallel, Replicated

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=13)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 13}


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


def test_unknown_models_are_refused_by_name():
    class LlamaForCausalLM(torch.nn.Linear):  # not transformers'
        pass

    for model in (
        on_meta(Qwen2ForCausalLM, Qwen2Config(**SMALL, num_key_value_heads=2)),
        LlamaForCausalLM(2, 2),
    ):
        name = type(model).__name__
        with pytest.raises(
            ValueError, match=rf"no plan for {name}, only for ptx.Transformer, .*plan="
        ):
            tp_plan(model)
