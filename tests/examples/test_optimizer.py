"""AdamW by groups, and steps that aren't finite, which all ranks skip together."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ptx
from harness import distributed
from optimizer import SkipNonFinite, make_adamw, steps_of

TINY = ptx.ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=8)


def names_by_group(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {g["name"]: {names[p] for p in g["params"]} for g in optimizer.param_groups}


def test_matrices_decay_and_vectors_do_not():
    model = ptx.Transformer(TINY)
    optimizer = make_adamw(model, 1e-3, weight_decay=0.1)
    groups = names_by_group(model, optimizer)
    assert {"norm.weight", "layers.0.ffn_norm.weight", "tok_embeddings.weight"} <= groups[
        "no decay"
    ]
    assert {"output.weight", "layers.1.attention.wq.weight"} <= groups["decay"]
    assert all("norm" not in name for name in groups["decay"])
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all(g["fused"] for g in optimizer.param_groups)
    embeds = names_by_group(model, make_adamw(model, 1e-3, decay_embeddings=True))
    assert "tok_embeddings.weight" in embeds["decay"]


def test_biases_tied_heads_and_frozen_parameters():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    groups = names_by_group(model, make_adamw(model, 1e-3))
    assert groups == {"decay": set(), "no decay": {"embed.weight", "head.bias"}}
    model["embed"].weight.requires_grad_(False)
    groups = names_by_group(model, make_adamw(model, 1e-3))
    assert groups == {"decay": set(), "no decay": {"head.bias"}}
    with pytest.raises(ValueError, match="no parameter of Embedding requires a gradient"):
        make_adamw(model["embed"], 1e-3)


def test_without_a_fused_kernel_foreach_takes_over_and_says_so_once(monkeypatch, capsys):
    step = torch.optim.AdamW.step

    def no_fused(self, closure=None):
        if self.param_groups[0]["fused"]:
            raise RuntimeError("`fused=True` requires what isn't here\nand more")
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", no_fused)
    layer = nn.Linear(2, 2)
    optimizer = make_adamw(layer, 1e-3)
    assert optimizer.param_groups[0]["foreach"]
    assert not optimizer.param_groups[0].get("fused")
    said = capsys.readouterr().err
    assert said == (
        "no fused AdamW for torch.float32 on cpu, using foreach: `fused=True` requires what isn't here\n"
    )
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    make_adamw(layer, 1e-3, fused=False)
    assert capsys.readouterr().err == ""


def test_a_skipped_step_changes_nothing():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer, skips = make_adamw(layer, 1e-2), SkipNonFinite(3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(number, poison):
        (layer(torch.ones(4)).sum() * poison).backward()
        norm = ptx.clip_grad_norm_(layer.parameters(), 1.0)
        applied = skips.before_step(norm, optimizer, number)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return applied

    assert not step(1, math.nan)  # the first: a schedule would warn if no step had been called
    assert not optimizer.state
    assert step(2, 1.0)
    weights = [p.detach().clone() for p in layer.parameters()]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in layer.parameters()]
    assert not step(3, math.inf)
    for parameter, weight, state in zip(layer.parameters(), weights, states, strict=True):
        assert torch.equal(parameter, weight)
        for key, value in state.items():
            assert torch.equal(optimizer.state[parameter][key], value)
    assert (skips.skipped, skips.in_a_row) == (2, 1)
    assert step(4, 1.0)
    assert (skips.skipped, skips.in_a_row) == (2, 0)

    copy = SkipNonFinite(3)
    copy.load_state_dict(skips.state_dict())
    assert vars(copy) == vars(skips)


def test_too_many_in_a_row_end_the_run():
    optimizer, skips = make_adamw(nn.Linear(2, 2), 1e-3), SkipNonFinite(2)
    skips.before_step(torch.tensor(math.nan), optimizer, 7)
    skips.before_step(torch.tensor(1.0), optimizer, 8)
    skips.before_step(torch.tensor(math.inf), optimizer, 9)
    with pytest.raises(FloatingPointError, match="step 10: the gradient norm is inf, the 2nd step"):
        skips.before_step(torch.tensor(math.inf), optimizer, 10)
    never = SkipNonFinite(0)
    for number in range(50):
        never.before_step(torch.tensor(math.nan), optimizer, number)
    assert never.skipped == 50


def train(mesh, poisoned_step):
    """Three steps on the same batch; one rank's loss of one step is NaN."""
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    optimizer, skips = make_adamw(model, 1e-2), SkipNonFinite(2)
    tokens = torch.arange(16).view(2, 8) % 32
    for step in (1, 2, 3):
        logits = model(tokens)
        loss = ptx.vocab_parallel_ce(logits, tokens, mesh["tp"], vocab_size=32)
        rank = torch.distributed.get_rank()
        poison = math.nan if step == poisoned_step and rank == mesh.size() - 1 else 1.0
        (loss * poison).backward()
        norm = ptx.clip_grad_norm_(model.parameters(), 1.0)
        applied = skips.before_step(norm, optimizer, step)
        assert applied == (step != poisoned_step)
        optimizer.step()
        optimizer.zero_grad()
    assert skips.skipped == (poisoned_step is not None)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


@distributed(world_size=4)
def test_one_ranks_nan_skips_the_step_on_all_ranks_of_a_mesh():
    got = train(ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu"), 2)
    assert all(value.isfinite().all() for value in got.values())
    # As a run that had only the other two steps.
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    ptx.materialize(model, "cpu", seed=0)
    optimizer = make_adamw(model, 1e-2)
    tokens = torch.arange(16).view(2, 8) % 32
    for _ in range(2):
        ptx.cross_entropy(model(tokens), tokens).backward()
        ptx.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-3, atol=1e-4)


@distributed(world_size=2)
def test_plain_tensors_beside_dtensors_have_groups_of_their_own():
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")["dp_shard"]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    nn.init.ones_(model[1].weight)
    optimizer = make_adamw(model, 0.1)
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "no decay"] * 2
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    want = torch.full((4, 4), 0.89)
    torch.testing.assert_close(model[0].weight.full_tensor(), want)
    torch.testing.assert_close(model[1].weight.detach(), want)


def test_the_end_by_steps_or_by_tokens():
    assert steps_of(600, 0, 4096) == 600
    assert steps_of(600, 4096 * 3, 4096) == 3
    assert steps_of(0, 4096 * 3 + 1, 4096) == 4
    with pytest.raises(ValueError, match="tokens -1 must be from 0"):
        steps_of(0, -1, 4096)
