"""Faults of other losses with the numbers they were seen with, for each loss, plain and split over ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from collectives import CollectiveLog
from harness import distributed
from loss import conformance
from loss.conformance_losses import LOSSES, OF_HIDDEN, OF_LOGITS, fits, on_full_logits
from ptx.loss import fused_linear_ce, token_logprobs

Loss = Callable[..., Tensor]


@distributed(world_size=2)
def test_L06_smoothing_is_over_the_global_vocabulary() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 3, 5, 7, 2, 6])
    for what, loss in _everywhere({"label_smoothing": 0.1}):
        got = loss(logits, labels, vocab_size=8, label_smoothing=0.1)
        assert got.item() == pytest.approx(3.3297121, abs=1e-6), what
        ranks = [torch.empty_like(got) for _ in range(2)]
        dist.all_gather(ranks, got)
        assert torch.equal(*ranks), what
        huge = loss(logits.float() * 1000, labels, vocab_size=8, label_smoothing=0.1)
        assert huge.isfinite(), what


@distributed(world_size=2)
def test_L07_labels_that_are_no_class_raise() -> None:
    for what, loss in _everywhere():
        for bad in (7, -1):
            with CollectiveLog() as seen, pytest.raises(ValueError, match=rf"first is {bad}"):
                loss(torch.zeros(4, 7), torch.tensor([0, 3, bad, 1]), vocab_size=7)
            assert not seen.count(), what
        # Nobody was left in a collective.
        good = loss(torch.zeros(4, 7), torch.tensor([0, 3, -100, 1]), vocab_size=7)
        assert good.item() == pytest.approx(math.log(7), abs=1e-6), what


@pytest.mark.parametrize("loss", [name for name in LOSSES if name in OF_HIDDEN])
def test_L09_weight_gradient_of_bf16_for_any_number_of_chunks(loss: str) -> None:
    """2.0e-3 or so; summed in bfloat16 it is 1.8e-2 after 256 chunks."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4096, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    labels = torch.randint(64, (4096,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.t(), labels).backward()

    def error(loss_of: Callable[[Tensor], Tensor]) -> float:
        mine = weight.clone().requires_grad_()
        loss_of(mine).backward()
        return float((mine.grad.double() - exact.grad).norm() / exact.grad.norm())

    fused = {"fused_linear_ce": fused_linear_ce, "token_logprobs": _mean_of_logprobs}[loss]
    eager = error(lambda w: F.cross_entropy((hidden @ w.t()).float(), labels))
    errors = [
        error(lambda w, n=chunks: fused(hidden, w, labels, chunk_tokens=4096 // n))
        for chunks in (1, 16, 256)
    ]
    assert errors[2] < 1.2 * errors[0], errors
    assert max(errors[1:]) <= 1.1 * eager, (errors, eager)
    # Of a single chunk the labels' part is added to a product that is rounded already.
    assert errors[0] <= 1.3 * eager, (errors, eager)


@distributed(world_size=2)
def test_L12_hidden_gradient_is_summed_over_tp_once() -> None:
    tp = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 5), torch.randn(8, 5)
    labels = torch.tensor([0, 4, 7])
    want = [t.clone().requires_grad_() for t in (hidden, weight)]
    F.cross_entropy(F.linear(*want), labels).backward()
    for layout in (None, Replicate(), Shard(0)):
        for loss in (fused_linear_ce, _mean_of_logprobs)[: len({*LOSSES} & {*OF_HIDDEN})]:
            body = hidden.clone().requires_grad_()
            states = body * 1  # as out of a body that is the same on both ranks, and sums nothing
            if layout is not None:
                states = DTensor.from_local(states, tp, [Replicate()]).redistribute(tp, [layout])
            head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
            loss(states, head, labels).backward()
            torch.testing.assert_close(body.grad, want[0].grad, atol=1e-6, rtol=0)
            mine = want[1].grad.chunk(2)[tp.get_local_rank()]
            torch.testing.assert_close(head.grad.to_local(), mine, atol=1e-6, rtol=0)


@distributed(world_size=2)
def test_L15_head_gradient_is_the_average_of_ranks_with_different_data() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Linear(4, 6, bias=False)
    hidden, labels = torch.randn(2, 5, 4), torch.randint(6, (2, 5))  # one row for each rank
    own = [torch.autograd.grad(_ce(plain, *data), plain.weight)[0] for data in zip(hidden, labels)]
    want = sum(own) / 2
    for loss in (fused_linear_ce, _mean_of_logprobs)[: len({*LOSSES} & {*OF_HIDDEN})]:
        head = fully_shard(copy.deepcopy(plain), mesh=mesh)
        with pytest.raises(ValueError, match=r"FSDP's shard.*pass the head module"):
            loss(hidden[rank], head.weight, labels[rank])
        loss(hidden[rank], head, labels[rank]).backward()
        torch.testing.assert_close(head.weight.grad.full_tensor(), want, atol=1e-6, rtol=0)
    # What this is about: each rank trains its rows on its own data.
    head = fully_shard(copy.deepcopy(plain), mesh=mesh)
    fused_linear_ce(hidden[rank], head.weight.full_tensor(), labels[rank]).backward()
    wrong = head.weight.grad.to_local()
    torch.testing.assert_close(wrong, own[rank].chunk(2)[rank])
    assert (wrong - want.chunk(2)[rank]).abs().max() > 0.01


@distributed(world_size=2)
def test_L16_options_at_their_default_change_no_bit() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 33), torch.randint(33, (7,))
    labels[3] = -100
    exact = logits.double()
    squares = torch.logsumexp(exact, -1).square() * (labels != -100)
    defaults = conformance.DEFAULTS
    for what, loss in _everywhere():
        off = {k: v for k, v in defaults.items() if k == "reduction" or fits(what[0], {k: v})}
        for reduction in ("mean", "sum", "none"):
            want = _grad(loss, logits, labels, reduction=reduction)
            got = _grad(loss, logits, labels, **off | {"reduction": reduction})
            assert torch.equal(got[0], want[0]), what
            assert torch.equal(got[1], want[1]), what
            if not fits(what[0], {"z_loss": 1e-4}):
                continue
            with_z = loss(exact, labels, vocab_size=33, z_loss=1e-4, reduction=reduction)
            without = loss(exact, labels, vocab_size=33, reduction=reduction)
            parts = {"mean": squares.sum() / 6, "sum": squares.sum(), "none": squares}
            torch.testing.assert_close(
                with_z - without, 1e-4 * parts[reduction], atol=1e-7, rtol=0, msg=str(what)
            )


@distributed(world_size=2)
def test_L18_softcap_is_applied_in_loss_and_gradient() -> None:
    logits, label = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([1])
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(torch.tanh(leaf), label).backward()
    for what, loss in _everywhere():
        capped, grad = _grad(loss, logits, label, softcap=1.0, gather=what)
        assert capped.item() == pytest.approx(2.3041632, abs=1e-6), what
        torch.testing.assert_close(grad, leaf.grad, msg=str(what))
        plain = loss(logits, label, vocab_size=3)
        assert plain.item() == pytest.approx(3.2413113, abs=1e-6), what


@distributed(world_size=2)
def test_M11_padded_columns_get_no_probability_and_no_gradient() -> None:
    labels = torch.tensor([0, 5, -100])
    for what, loss in _everywhere():
        got, grad = _grad(loss, torch.zeros(3, 8), labels, vocab_size=6, gather=what)
        assert got.item() == pytest.approx(math.log(6), abs=1e-6), what  # 2.0794415 with padding
        assert torch.equal(grad[:, 6:], torch.zeros(3, 2)), what
        assert (grad[:2, :6] != 0).all(), what


def _everywhere(options: dict[str, Any] | None = None) -> Iterator[tuple[tuple[str, int], Loss]]:
    """Each loss that has the options, on one rank and over both."""
    for name in LOSSES:
        if fits(name, options or {}):
            yield (name, 1), on_full_logits(name, _alone(), None)
            yield (name, 2), on_full_logits(name, init_device_mesh("cpu", (2,)), None)


def _alone() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]


def _grad(
    loss: Loss,
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    gather: tuple[str, int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient; of the columns of both ranks if ``gather`` says what they were split over."""
    leaf = logits.clone().requires_grad_()
    got = loss(leaf, labels, vocab_size=vocab_size or logits.shape[-1], **options)
    got.sum().backward()
    if gather and gather[0] in OF_LOGITS and gather[1] == 2:
        dist.all_reduce(leaf.grad)
    return got.detach(), leaf.grad


def _ce(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), labels)


def _mean_of_logprobs(hidden: Tensor, head: Any, labels: Tensor, **options: Any) -> Tensor:
    return -token_logprobs(hidden, head, labels, **options).mean()
