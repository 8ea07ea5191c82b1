"""The head module of fused_linear_ce and token_logprobs under FSDP2: exact in every group, and what it communicates."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ptx
from harness import distributed
from ptx.loss import fused_linear_ce, token_logprobs
from ptx.loss._head import find_head
from ptx.parallel import accumulate_grads

ARGS = ptx.ModelArgs(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=13, max_seq_len=16)
GROUPS = ("alone", "with norm", "root", "tied", "tied root")
MICRO_BATCHES = 2
ENTROPY = 0.3  # its weight beside the log-probabilities


@pytest.mark.parametrize("group", GROUPS)
@distributed(world_size=2)
def test_L15_every_group(group: str) -> None:
    """L15: the head's gradient is the average over ranks with different data."""
    mesh = ptx.build_mesh(device_type="cpu")
    for freed, loss in product((False, True), ("sum", "none", "logprobs")):
        model, head = _wrapped(mesh, group, freed=freed)
        counts = _Counts(head)
        _train(model, mesh, chunk=3, loss=loss)
        _assert_trained(model, mesh, loss=loss)
        # Freed after the forward, it is gathered once more: by the loss, if another member of the
        # group ran before, or at the start of the backward.
        assert counts.reduces == MICRO_BATCHES
        assert counts.gathers == MICRO_BATCHES * (2 if freed else 1), (freed, counts.gathers)


@distributed(world_size=2)
def test_head_alone_is_reduced_before_the_backward_of_the_rest() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    for group in ("alone", "tied"):
        model, head = _wrapped(mesh, group)
        order: list[str] = []
        model.layers["0"].register_full_backward_pre_hook(lambda *_, o=order: o.append("block"))
        _Counts(head, order)
        _train(model, mesh, chunk=3)
        expected = ["head", "block"] if group == "alone" else ["block", "head"]
        assert order == expected * MICRO_BATCHES


@pytest.mark.parametrize("group", GROUPS)
@distributed(world_size=4)
def test_hsdp_and_tp(group: str) -> None:
    for degrees, sequence_parallel, loss in (
        ({"dp_replicate": 2, "dp_shard": 2}, True, "sum"),
        ({"dp_replicate": 2, "dp_shard": 2}, True, "logprobs"),
        ({"dp_shard": 2, "tp": 2}, True, "sum"),
        ({"dp_shard": 2, "tp": 2}, True, "logprobs"),
        ({"dp_shard": 2, "tp": 2}, False, "sum"),
        ({"dp_shard": 2, "tp": 2}, False, "logprobs"),
    ):
        mesh = ptx.build_mesh(**degrees, device_type="cpu")
        model, head = _wrapped(mesh, group, sequence_parallel=sequence_parallel)
        counts = _Counts(head)
        _train(model, mesh, chunk=None, loss=loss)
        _assert_trained(model, mesh, loss=loss)
        assert (counts.gathers, counts.reduces) == (MICRO_BATCHES, MICRO_BATCHES)


@pytest.mark.parametrize("group", ["alone", "with norm", "tied"])
@distributed(world_size=2)
def test_accumulation_reduces_once(group: str) -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    model, head = _wrapped(mesh, group)
    counts = _Counts(head)
    for _ in range(2):
        counts.gathers = counts.reduces = 0
        model.zero_grad()
        _train(model, mesh, chunk=3, accumulate=True)
        _assert_trained(model, mesh)
        assert counts.reduces == 1
        assert counts.gathers <= MICRO_BATCHES


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("frozen", ["body", "head"])
@distributed(world_size=2)
def test_one_side_frozen(group: str, frozen: str) -> None:
    if "tied" in group:
        return  # one parameter on both sides
    mesh = ptx.build_mesh(device_type="cpu")
    for loss in ("sum", "logprobs"):
        model, head = _wrapped(mesh, group, frozen=frozen)
        counts = _Counts(head)
        _train(model, mesh, chunk=3, loss=loss)
        _assert_trained(model, mesh, frozen=frozen, loss=loss)
        assert counts.reduces == (0 if frozen == "head" and group == "alone" else MICRO_BATCHES)


@pytest.mark.parametrize("group", GROUPS)
@distributed(world_size=2)
def test_evaluation_leaves_the_head_sharded(group: str) -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    model, head = _wrapped(mesh, group)
    tokens, labels = _data(mesh, mine=True)
    for _ in range(2):
        with torch.no_grad():
            hidden = model(tokens[0], return_hidden=True)
            loss = fused_linear_ce(hidden, head, labels[0])
            logprobs, _ = token_logprobs(hidden, head, labels[0], entropy=True)
        plain = _plain(group)
        plain.output.weight.data.copy_(head.weight.full_tensor())
        logits = _hidden_of(hidden) @ plain.output.weight.t()
        torch.testing.assert_close(loss, ptx.cross_entropy(logits, labels[0]))
        want = ptx.cross_entropy(logits, labels[0], reduction="none")
        torch.testing.assert_close(logprobs, -want)
        assert all(isinstance(p, DTensor) for p in head.parameters())
        with torch.no_grad():
            for parameter in head.parameters():  # lost, if this were the gathered copy
                parameter.mul_(2)


@pytest.mark.parametrize("group", ["alone", "with norm", "tied root"])
@distributed(world_size=2)
def test_mixed_precision(group: str) -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if group == "alone":  # a head by itself has an output dtype, which isn't the loss's
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
        )
    for kind in ("sum", "logprobs"):
        model, head = _wrapped(mesh, group, policy=policy)
        loss = _train(model, mesh, chunk=3, loss=kind)
        assert loss.dtype == torch.float32
        assert not torch.equal(loss, loss.bfloat16().float())
        grad = _whole(head.weight.grad)
        assert grad.dtype == torch.float32
        expected = _reference(mesh, group, loss=kind).output.weight.grad
        assert (grad - expected).norm() / expected.norm() < 3e-2
        assert not torch.equal(grad, grad.bfloat16().float())  # averaged in float32


@distributed(world_size=2)
def test_two_losses_before_one_backward_and_two_backwards() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    for group in GROUPS:
        model, head = _wrapped(mesh, group)
        tokens, labels = _data(mesh, mine=True)
        scale = ptx.token_scale(list(labels), ptx.loss_mesh(mesh))
        losses = [
            fused_linear_ce(model(t, return_hidden=True), head, y, reduction="sum") * scale
            for t, y in zip(tokens, labels)
        ]
        (0.25 * sum(losses)).backward(retain_graph=True)
        (0.75 * sum(losses)).backward()
        _assert_trained(model, mesh)


@distributed(world_size=2)
def test_rank_without_a_label_takes_part() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    for group, loss in product(("alone", "with norm", "tied"), ("sum", "logprobs")):
        model, _ = _wrapped(mesh, group)
        _train(model, mesh, chunk=3, empty_rank=1, loss=loss)
        _assert_trained(model, mesh, empty_rank=1, loss=loss)


@distributed(world_size=2)
def test_raw_shards_and_unready_models_are_refused() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    tokens, labels = _data(mesh, mine=True)
    hidden = torch.randn(*labels[0].shape, 16)
    for group in GROUPS:
        model, head = _wrapped(mesh, group)
        with pytest.raises(ValueError, match="was not called yet"):
            fused_linear_ce(hidden, head, labels[0])
        with pytest.raises(ValueError, match=r"FSDP's shard.*pass the head module"):
            fused_linear_ce(hidden, head.weight, labels[0])
        with pytest.raises(ValueError, match=r"FSDP's shard"):
            fused_linear_ce(hidden, head.weight.detach() * 1, labels[0])
        fused_linear_ce(model(tokens[0], return_hidden=True), head, labels[0])
        handle = head.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match="hooks"):
            fused_linear_ce(hidden, head, labels[0])
        handle.remove()
        assert find_head(head, None, "").alone == (group == "alone")


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@distributed(world_size=2)
def test_parametrized_head_is_exact_or_refused() -> None:
    """The weight that is computed of FSDP's shards looks like one of tensor parallelism's."""
    mesh = ptx.build_mesh(device_type="cpu")
    tokens, labels = _data(mesh, mine=True)
    plain, twice = _plain("alone"), _plain("alone")
    nn.utils.parametrize.register_parametrization(twice.output, "weight", _Doubled())
    hidden = plain(tokens[0], return_hidden=True)
    got = fused_linear_ce(hidden, twice.output, labels[0])
    torch.testing.assert_close(got, fused_linear_ce(hidden, 2 * plain.output.weight, labels[0]))
    for group in ("alone", "root"):
        model = copy.deepcopy(twice)
        if group == "alone":
            fully_shard(model.output, mesh=ptx.fsdp_mesh(mesh))
        fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
        hidden = model(tokens[0], return_hidden=True)
        for loss in (fused_linear_ce, token_logprobs):
            with pytest.raises(ValueError, match=r"head's \['weight'\] is computed"):
                loss(hidden, model.output, labels[0])


class _LossInside(nn.Module):
    """A model that returns its loss, and needs another parameter of its own group after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.output = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 7)
        self.value = nn.Linear(5, 1)

    def forward(self, states: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(states)
        loss = (
            fused_linear_ce(hidden, self.output, labels)
            - token_logprobs(hidden, self.output, labels).mean()
        )
        return loss + self.value(hidden).mean()


@distributed(world_size=2)
def test_loss_inside_the_forward_leaves_the_rest_of_the_group_alone() -> None:
    mesh = ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu"))
    torch.manual_seed(0)
    states, labels, plain = torch.randn(4, 5), torch.randint(7, (4,)), _LossInside()
    for head_alone, freed, frozen in product((False, True), repeat=3):
        model, want = copy.deepcopy(plain), copy.deepcopy(plain)
        for both in (model, want):
            both.body.requires_grad_(not frozen)
            both.output.requires_grad_(not frozen)
        fully_shard(model.body, mesh=mesh)
        if head_alone:
            fully_shard(model.output, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=freed)
        with torch.no_grad():
            torch.testing.assert_close(model(states, labels), want(states, labels))
        if freed or head_alone:
            assert isinstance(model.output.weight, DTensor)
        if freed:
            assert isinstance(model.value.weight, DTensor)
        model(states, labels).backward()
        want(states, labels).backward()
        for got, expected in zip(model.parameters(), want.parameters()):
            assert (got.grad is None) == (expected.grad is None)
            if got.grad is not None:
                torch.testing.assert_close(_whole(got.grad), expected.grad)


class _Beside(nn.Module):
    """A head outside the module that holds all the rest, as in transformers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = _plain("tied" if tied else "")
        self.lm_head = self.model.output
        self.model.output = None

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@distributed(world_size=2)
def test_head_beside_the_root() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    for tied in (False, True):
        model = ptx.apply_fsdp2(_Beside(tied), ptx.fsdp_mesh(mesh))
        tokens, labels = _data(mesh, mine=True)
        scale = ptx.token_scale(list(labels), ptx.loss_mesh(mesh))
        counts = _Counts(model.lm_head)
        for t, y in zip(tokens, labels):
            loss = fused_linear_ce(model.model(t), model.lm_head, y, reduction="sum")
            (loss * scale).backward()
        assert (counts.gathers, counts.reduces) == (MICRO_BATCHES, MICRO_BATCHES)
        want = _reference(mesh, "tied" if tied else "")
        for got, expected in (
            (model.lm_head.weight, want.output.weight),
            (model.model.layers["0"].attention.wq.weight, want.layers["0"].attention.wq.weight),
        ):
            torch.testing.assert_close(_whole(got.grad), expected.grad, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_head_that_is_the_whole_model() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 4, 5), torch.randint(7, (2, 4))  # a row for each rank
    plain = nn.Linear(5, 7)
    model = ptx.apply_fsdp2(copy.deepcopy(plain), ptx.fsdp_mesh(mesh), units=[])
    mine = mesh["dp_shard"].get_local_rank()
    fused_linear_ce(hidden[mine], model, labels[mine]).backward()
    F.cross_entropy(plain(hidden).flatten(0, 1), labels.flatten()).backward()
    for got, want in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(_whole(got.grad), want.grad)


@distributed(world_size=1)
def test_one_rank_wraps_too() -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    for group in GROUPS:
        model, _ = _wrapped(mesh, group)
        _train(model, mesh, chunk=None)
        _assert_trained(model, mesh)


def _plain(group: str) -> ptx.Transformer:
    torch.manual_seed(0)
    model = ptx.Transformer(replace(ARGS, tie_embeddings="tied" in group))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # else the loss is ln V
    return model


def _wrapped(
    mesh: Any,
    group: str,
    *,
    freed: bool = False,
    frozen: str | None = None,
    policy: MixedPrecisionPolicy | None = None,
    sequence_parallel: bool = True,
) -> tuple[ptx.Transformer, nn.Linear]:
    """``freed``: whether the head's group is freed after the forward, as apply_fsdp2 never does."""
    model = _plain(group)
    _freeze(model, frozen)
    dp, policy = ptx.fsdp_mesh(mesh), policy or MixedPrecisionPolicy()
    plan = ptx.tp_plan(model, sequence_parallel=sequence_parallel)
    ptx.apply_tp(model, mesh["tp"], plan)
    model.group = group
    if freed or "root" in group:
        fully_shard(model.layers["0"], mesh=dp, mp_policy=policy)
        members = {
            "alone": [model.output],
            "with norm": [model.norm, model.output],
            "tied": [model.tok_embeddings, model.output],
        }.get(group)
        if members:
            fully_shard(
                members if len(members) > 1 else members[0],
                mesh=dp,
                mp_policy=policy,
                reshard_after_forward=True,
            )
            fully_shard(model, mesh=dp, mp_policy=policy)
        else:
            fully_shard(
                model, mesh=dp, mp_policy=policy, reshard_after_forward=True if freed else None
            )
    else:
        units = ["layers.*", ["norm", "output"]] if group == "with norm" else None
        ptx.apply_fsdp2(model, dp, units=units, mp_policy=policy)
    return model, model.output


def _freeze(model: ptx.Transformer, frozen: str | None) -> None:
    for name, parameter in model.named_parameters():
        if frozen is not None:
            parameter.requires_grad_((name == "output.weight") != (frozen == "head"))


def _data(mesh: Any, *, mine: bool, empty_rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and labels [micro-batch, data rank, batch, sequence], or only this rank's."""
    data = ptx.data_mesh(mesh)
    torch.manual_seed(7)
    shape = (MICRO_BATCHES, data.size(), 2, 4)
    tokens, labels = torch.randint(13, shape), torch.randint(13, shape)
    for rank in range(data.size()):  # a different number of labels on every rank
        labels[:, rank, :, : rank + 1] = -100
    labels[0, 0, 0, 1] = -100
    if empty_rank is not None:
        labels[:, empty_rank] = -100
    if mine:
        rank = data.get_local_rank()
        return tokens[:, rank], labels[:, rank]
    return tokens, labels


def _train(
    model: ptx.Transformer,
    mesh: Any,
    *,
    chunk: int | None,
    accumulate: bool = False,
    empty_rank: int | None = None,
    loss: Any = "sum",
) -> Tensor:
    """``loss``: a reduction, or "logprobs" with an entropy bonus."""
    tokens, labels = _data(mesh, mine=True, empty_rank=empty_rank)
    scale = ptx.token_scale(list(labels), ptx.loss_mesh(mesh), vocab_size=13)
    for i, (t, y) in enumerate(zip(tokens, labels)):
        last = i == MICRO_BATCHES - 1
        # Only where it is needed: it would also reduce what the loss forgot to.
        with accumulate_grads(model, last=last) if accumulate else nullcontext():
            given = model(t, return_hidden=True), model.output, y
            if loss == "logprobs":
                logprobs, entropy = token_logprobs(*given, chunk_tokens=chunk, entropy=True)
                losses = -logprobs - ENTROPY * entropy
            else:
                losses = fused_linear_ce(*given, reduction=loss, chunk_tokens=chunk)
            (losses.sum() * scale).backward()
    return losses.detach()


def _reference(
    mesh: Any,
    group: str,
    frozen: str | None = None,
    empty_rank: int | None = None,
    loss: str = "sum",
) -> ptx.Transformer:
    model = _plain(group)
    _freeze(model, frozen)
    tokens, labels = _data(mesh, mine=False, empty_rank=empty_rank)
    logits = model(tokens.reshape(-1, 4)).flatten(0, 1)
    mean = F.cross_entropy(logits, labels.flatten())
    if loss == "logprobs":
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        mean = mean - ENTROPY * entropy[labels.flatten() != -100].mean()
    mean.backward()
    return model


def _assert_trained(
    model: ptx.Transformer,
    mesh: Any,
    frozen: str | None = None,
    empty_rank: int | None = None,
    loss: str = "sum",
) -> None:
    plain = _reference(mesh, model.group, frozen, empty_rank, loss)
    want = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        expected = want[name].grad
        if expected is None:
            assert parameter.grad is None, name
            continue
        grad = _whole(parameter.grad)
        error = (grad - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5, f"{model.group}, {name}: off by {float(error):.1e}"


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _hidden_of(hidden: Tensor) -> Tensor:
    return _whole(hidden).detach()


class _Counts:
    """How often the group that holds the head gathers its parameters and reduces its gradients."""

    def __init__(self, head: nn.Linear, order: list[str] | None = None) -> None:
        self.gathers = self.reduces = 0
        counts = self

        class Gather(DefaultAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                counts.gathers += 1
                return super().__call__(*args, **kwargs)

        class Reduce(DefaultReduceScatter):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                counts.reduces += 1
                if order is not None:
                    order.append("head")
                return super().__call__(*args, **kwargs)

        module = find_head(head, None, "").state._modules[0]
        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Reduce())


@distributed(world_size=2)
def test_a_tp_weight_beside_another_model_of_fsdps():
    other = nn.Linear(4, 4)
    fully_shard(other)  # on a mesh of torch's, over the same ranks and without names too
    tp = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight = torch.randn(9, 4)
    head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
    hidden, labels = torch.randn(3, 4), torch.tensor([1, 2, 8])
    loss = fused_linear_ce(hidden, head, labels)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels))
    with pytest.raises(ValueError, match="FSDP's shard"):
        fused_linear_ce(hidden, other.weight, labels)
