from dataclasses import replace

import pytest
import torch
from torch import nn

from ptx.model import ModelArgs, Transformer
from ptx.model._norm import RMSNorm

ARGS = ModelArgs(
    dim=64,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=512,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


def test_distributions():
    torch.manual_seed(0)
    model = Transformer(ARGS)
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in kind:
            assert (parameter == 1).all(), name
        else:
            std = {"output": 64**-0.5 * 0.987, "wo": 0.02 / 4, "w2": 0.02 / 4}.get(kind, 0.02)
            assert abs(parameter.std().item() / std - 1) < 0.05, name
            assert abs(parameter.mean().item()) < 0.1 * std, name
    assert model.output.weight.abs().max() <= 3 * 64**-0.5


def test_every_parameter_is_drawn():
    """Allocation leaves garbage, so whatever init_weights forgets would stay that."""
    model = Transformer(ARGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert not [name for name, p in model.named_parameters() if p.isnan().any()]


def draws(monkeypatch, build):
    """Which parameters nn.init functions are called on, as (function, id)."""
    calls = []

    def record(function, real):
        def recorded(tensor, *args, **kwargs):
            if not tensor.is_meta:
                calls.append((function, id(tensor)))
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(nn.init, function, recorded)

    for function in ("normal_", "trunc_normal_", "ones_", "zeros_"):
        record(function, getattr(nn.init, function))
    return build(), calls


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_drawn_once_as_a_whole(monkeypatch, tied):
    """A second draw would cost time, make a tie's values depend on order, and shift keyed draws."""
    args = replace(ARGS, tie_embeddings=tied)
    model, calls = draws(monkeypatch, lambda: Transformer(args))
    assert sorted(tensor for _, tensor in calls) == sorted(id(p) for p in model.parameters())
    truncated = [tensor for function, tensor in calls if function == "trunc_normal_"]
    assert truncated == ([] if tied else [id(model.output.weight)])


def test_tied_weight_is_drawn_as_an_embedding():
    torch.manual_seed(0)
    model = Transformer(replace(ARGS, tie_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert abs(model.output.weight.std().item() / 0.02 - 1) < 0.05
    model.tok_embeddings = None  # the last part of a pipeline
    model.init_weights()
    assert abs(model.output.weight.std().item() / 0.02 - 1) < 0.05


def test_meta_model_allocates_and_draws_nothing(monkeypatch):
    def build():
        with torch.device("meta"):
            return Transformer(replace(ARGS, tie_embeddings=True))

    model, calls = draws(monkeypatch, build)
    assert all(p.is_meta for p in model.parameters())
    assert model.output.weight is model.tok_embeddings.weight
    assert calls == []


def test_parts_and_wrapped_layers_are_drawn_alike():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = Transformer(ARGS)
    for key in "0123456":
        del model.layers[key]
    model.tok_embeddings = model.norm = model.output = None
    model.layers["7"].attention.wo = checkpoint_wrapper(model.layers["7"].attention.wo)
    model.layers["7"] = checkpoint_wrapper(model.layers["7"])
    model.init_weights()
    residual = dict(model.named_parameters())
    (wo,) = (p for n, p in residual.items() if "wo" in n and n.endswith("weight"))
    assert abs(wo.std().item() / (0.02 / 4) - 1) < 0.05  # by the whole model's depth


def test_default_dtype_and_eps_reach_the_modules():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Transformer(replace(ARGS, norm_eps=1e-3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {m.eps for m in model.modules() if isinstance(m, RMSNorm)} == {1e-3}
