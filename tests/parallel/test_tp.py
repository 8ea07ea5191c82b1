"""`apply_tp` on the own Transformer: loss and every gradient against one process."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import distributed
from torch.distributed.tensor import DTensor

from ptx.mesh import build_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan

BASE = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=13, hidden_dim=24)


def build(args, **kwargs):
    torch.manual_seed(0)
    model = Transformer(args)
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(p, 1.0 * ("norm" in name), 0.1)
    return model


def batch(args, rows=2, length=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(args.vocab_size, (2, rows, length), generator=generator)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model, tokens, labels):
    logits = full(model(tokens))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def check(args, mesh, plan=None, rows=2, length=8):
    tokens, labels = batch(args, rows, length)
    want_model = build(args)
    want = loss_of(want_model, tokens, labels)
    want.backward()
    model = apply_tp(build(args), mesh, plan and plan(want_model))
    got = loss_of(model, tokens, labels)
    got.backward()
    worst = [("loss", rel(got, want))]
    for (n, p), (_, w) in zip(model.named_parameters(), want_model.named_parameters(), strict=True):
        assert isinstance(p, DTensor), n
        worst.append((n, rel(full(p.grad), w.grad)))
    bad = [x for x in worst if x[1] > 1e-5]
    assert not bad, bad
    return max(x[1] for x in worst)


def rel(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


CASES = {
    "plain": {},
    "tied": dict(tie_embeddings=True),
    "bias": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": dict(qk_norm=True),
    "mix": dict(qk_norm=True, qkv_bias=True, sliding_window=3, nope_layers=(True, False), tie_embeddings=True, n_kv_heads=1),
    "mha": dict(n_kv_heads=4),
    "tiny vocab": dict(vocab_size=3),
}


@pytest.mark.parametrize("tp", [2, 4])
@distributed(world_size=4)
def test_all(tp):
    mesh = build_mesh(tp=tp, device_type="cpu")["tp"]
    for name, case in CASES.items():
        args = dataclasses.replace(BASE, **case)
        for sp in (True, False):
            try:
                w = check(args, mesh, lambda m: tp_plan(m, sequence_parallel=sp))
                print(name, sp, w)
            except Exception as e:
                print("FAIL", name, sp, repr(e)[:300])
    import torch.distributed as dist
    assert dist.get_rank()
