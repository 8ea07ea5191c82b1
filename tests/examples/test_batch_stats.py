"""Token range, labels that count and logits: the numbers of one process on every mesh."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ptx
from across_ranks import across_ranks
from batch_stats import LogitsWatch, batch_stats
from harness import distributed

TINY = ptx.ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=30, max_seq_len=8)


def batch():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (4, 8), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[3, 2:] = -100  # not equally many on each rank
    return tokens, labels


def measure(degrees):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    data = ptx.data_mesh(mesh)
    tokens, labels = (t.chunk(data.size())[data.get_local_rank()] for t in batch())
    watch = LogitsWatch(model)
    model(tokens)
    assert watch.take() is None  # off
    watch.on = True
    model(tokens, return_hidden=True)
    assert watch.take() is None
    for micro in tokens.chunk(len(tokens)):
        model(micro)
    found = batch_stats(tokens, labels, ptx.loss_mesh(mesh), logits=watch)
    assert "logits/max_abs" not in batch_stats(tokens, labels, ptx.loss_mesh(mesh), logits=watch)
    watch.close()
    model(tokens)
    assert watch.take() is None
    return found


def plain():
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    ptx.materialize(model, "cpu", seed=0)
    tokens, labels = batch()
    with torch.no_grad():
        logits = model(tokens)
    return {
        "input/max": tokens.max().item(),
        "input/min": tokens.min().item(),
        "labels/valid": (labels != -100).sum().item(),
        "logits/max_abs": logits.abs().max().item(),
        "logits/nonfinite": 0,
    }


@pytest.mark.parametrize("degrees", [{}, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 4}])
@distributed(world_size=4)
def test_as_one_process_sees_it(degrees):
    assert measure(degrees) == pytest.approx(plain(), rel=1e-5)


@distributed(world_size=1)
def test_on_one_rank():
    assert measure({}) == pytest.approx(plain(), rel=1e-6)


@distributed(world_size=1)
def test_logits_that_are_not_finite_are_counted_and_left_out():
    class Bad(nn.Module):
        def forward(self, tokens):
            logits = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
            logits[0, 0, 0], logits[1, 2, 3], logits[1, 0, 0] = math.nan, -math.inf, -7
            return logits

    watch = LogitsWatch(model := Bad())
    watch.on = True
    model(None)
    largest, bad = watch.take()
    assert (largest.item(), bad.item()) == (7.0, 2)


@distributed(world_size=4)
def test_how_a_number_is_spread_over_ranks():
    rank = dist.get_rank()
    got = across_ranks({"train/dt": float(rank), "train/mem_alloc": 2.0**40 + rank})
    assert got["train/dt/min"] == 0
    assert got["train/dt/max"] == 3
    assert got["train/dt/mean"] == 1.5
    assert got["train/dt/std"] == pytest.approx(math.sqrt(1.25))
    assert got["train/mem_alloc/max"] == 2.0**40 + 3  # to the byte
    assert across_ranks({}) == {}


def test_one_rank_is_not_spread():
    assert across_ranks({"train/dt": 1.0}) == {}
