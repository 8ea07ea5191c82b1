"""float16 gradients: what a loss scale makes of them, against eager. Their range is 6e-8 to 65504."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from harness import distributed
from ptx.loss import fused_linear_ce, token_logprobs

SCALE = 65536.0  # where torch.amp.GradScaler starts


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scaled_loss_has_eagers_error(chunk: int | None, reduction: str) -> None:
    hidden, weight, labels = _inputs()
    scale = SCALE if reduction == "mean" else SCALE / len(labels)
    want = _gradients(_eager(labels, reduction), hidden.double(), weight.double(), scale)
    eager = _errors(_gradients(_eager(labels, reduction), hidden, weight, scale), want)
    for loss in (
        lambda h, w: fused_linear_ce(h, w, labels, chunk_tokens=chunk, reduction=reduction),
        lambda h, w: _reduced(-token_logprobs(h, w, labels, chunk_tokens=chunk), labels, reduction),
        lambda h, w: _reduced(
            -token_logprobs(h, w, labels, chunk_tokens=chunk, entropy=True)[0], labels, reduction
        ),
    ):
        mine = _errors(_gradients(loss, hidden, weight, scale), want)
        assert all(a <= 1.1 * b for a, b in zip(mine, eager)), (mine, eager)


@pytest.mark.parametrize("chunk", [1024, 256])
def test_a_sum_that_is_scaled_down_does_not_overflow(chunk: int) -> None:
    hidden = torch.full((1024, 2), 300.0).half()
    weight = torch.zeros(3, 2).half()
    labels = torch.zeros(1024, dtype=torch.long)  # gradients of 1e5 and 2e5, before they are scaled

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return fused_linear_ce(h, w, labels, reduction="sum", chunk_tokens=chunk)

    (_, got), (_, unscaled) = (_gradients(loss, hidden, weight, s) for s in (2**-10, 1.0))
    assert unscaled.isinf().all()  # as eager's
    _, want = _gradients(_eager(labels, "sum"), hidden, weight, 2**-10)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0.0)


def test_parts_may_leave_the_range_if_their_sum_does_not() -> None:
    hidden = torch.full((2048, 2), 300.0).half()
    weight = torch.zeros(2, 2).half()
    labels = torch.arange(2048) // 1024  # each half of the tokens alone gives +-1.5e5

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return fused_linear_ce(h, w, labels, reduction="sum", chunk_tokens=1024)

    _, grad = _gradients(loss, hidden, weight, 1.0)
    assert torch.equal(grad, torch.zeros_like(weight))
    # The label's own part and the rest cancel: all but sure of the right class.
    sure, one = torch.tensor([[11.0, 0.0]]).half(), torch.tensor([0])
    head = torch.tensor([[1.5, 1.0], [0.0, 1.0]]).half()
    for got, want in zip(
        _gradients(lambda h, w: fused_linear_ce(h, w, one), sure, head, SCALE),
        _gradients(_eager(one, "mean"), sure, head, SCALE),
    ):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("factor", [1.0, 2.0**20])
def test_grad_scaler_steps_and_skips_as_with_eager(factor: float) -> None:
    hidden, weight, labels = _inputs()
    results = []
    for loss_fn in (_eager(labels, "mean"), lambda h, w: fused_linear_ce(h, w, labels)):
        head = nn.Parameter(weight.clone().float())
        optimizer = torch.optim.SGD([head], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * factor)
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(hidden, head)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append((head.detach() - weight, scaler.get_scale()))
    (want, want_scale), (got, got_scale) = results
    assert got_scale == want_scale == SCALE * factor * (1.0 if factor == 1.0 else 0.5)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


@distributed(world_size=2)
def test_tp() -> None:
    tp = init_device_mesh("cpu", (2,))
    hidden, weight, labels = _inputs()
    want = _gradients(_eager(labels, "mean"), hidden.double(), weight.double(), SCALE)
    eager = _errors(_gradients(_eager(labels, "mean"), hidden, weight, SCALE), want)
    for chunk in (None, 64):
        head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
        states = hidden.clone().requires_grad_()
        (SCALE * fused_linear_ce(states, head, labels, chunk_tokens=chunk)).backward()
        mine = _errors([states.grad, head.grad.full_tensor()], want)
        # The ranks' parts of the hidden state's gradient are rounded once more.
        assert mine[0] <= 2 * eager[0], (mine, eager)
        assert mine[1] <= 1.1 * eager[1], (mine, eager)


def test_costs_a_matmul_more() -> None:
    hidden, weight, labels = _inputs()
    with FlopCounterMode(display=False) as counter:
        _gradients(lambda h, w: fused_linear_ce(h, w, labels, chunk_tokens=64), hidden, weight, 1.0)
    kept = int((labels != -100).sum())
    assert counter.get_total_flops() == 4 * 2 * kept * weight.numel()


@pytest.mark.gpu
def test_on_an_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    hidden, weight, labels = (t.to(device) for t in _inputs())
    want = _gradients(_eager(labels, "mean"), hidden.double(), weight.double(), SCALE)
    eager = _errors(_gradients(_eager(labels, "mean"), hidden, weight, SCALE), want)
    for chunk in (None, 64):
        mine = _errors(
            _gradients(
                lambda h, w, c=chunk: fused_linear_ce(h, w, labels, chunk_tokens=c),
                hidden,
                weight,
                SCALE,
            ),
            want,
        )
        assert all(a <= 1.1 * b for a, b in zip(mine, eager)), (mine, eager)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(2000, (300,))
    labels[::10] = -100
    return torch.randn(300, 16).half(), (0.25 * torch.randn(2000, 16)).half(), labels


def _eager(labels: Tensor, reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        logits = logits.float() if logits.dtype == torch.float16 else logits
        return F.cross_entropy(logits, labels, reduction=reduction)

    return loss


def _reduced(losses: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return losses.sum() / (1 if reduction == "sum" else (labels != -100).sum())


def _gradients(loss_fn: Any, hidden: Tensor, weight: Tensor, scale: float) -> list[Tensor]:
    given = [t.clone().requires_grad_() for t in (hidden, weight)]
    return list(torch.autograd.grad(scale * loss_fn(*given), given))


def _errors(got: list[Any], want: list[Tensor]) -> list[float]:
    return [float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want)]
