"""Tiny random transformers models against ours: logits, gradients, and that every switch
matters."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from model.families import CASES, args_of, build, tokens
from ptx.model import ModelArgs, Transformer

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


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_every_switch_matters(name):
    case = CASES[name]
    model, args = build(name), args_of(name)
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
    model = build(name)
    mine = ours(model, args_of(name))
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
