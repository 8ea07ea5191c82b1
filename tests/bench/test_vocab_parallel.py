"""vocab_parallel_ce against torch's loss_parallel and three all-reduces, on the same ranks and rounds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interleaved import in_rounds, interleaved, median_ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import harness
from collectives import CollectiveLog
from ptx.loss import vocab_parallel_ce

N, V = 512, 32000
ROUNDS = int(os.environ.get("PTX_BENCH_ROUNDS", "15"))
NAMES = ("vocab_parallel_ce", "three all-reduces in place", "torch's loss_parallel")
# Times the others, in this order.
LIMITS = (1.0, 0.6)


@pytest.mark.bench
@pytest.mark.parametrize("ranks", [2, 4])
def test_time_error_and_bytes(ranks):
    answers = harness.run(_measure, ranks, timeout=1200)
    # A round takes as long as its slowest rank.
    seconds = {
        name: [max(times) for times in zip(*(answer[0][name] for answer in answers))]
        for name in NAMES
    }
    print(f"\n{ranks} ranks, N {N}, V {V}, fp32: forward and backward")
    head = (
        f"{'ms':>7s} {'ptx / it':>9s} {'CPU ms':>7s} {'error':>9s} {'bytes per row and rank':>24s}"
    )
    print(f"{'':28s} {head}")
    ratios = {name: median_ratio(seconds[NAMES[0]], seconds[name]) for name in NAMES}
    for name in NAMES:
        error, sent, cpu = (max(answer[i][name] for answer in answers) for i in (1, 2, 3))
        ms = 1e3 * statistics.median(seconds[name])
        print(
            f"{name:28s} {ms:7.1f} {ratios[name]:9.2f} {1e3 * cpu:7.1f} {error:9.1e} {sent / N:24.1f}"
        )
    assert max(answer[1][NAMES[0]] for answer in answers) <= 1e-6
    assert {answer[2][NAMES[0]] for answer in answers} == {12 * N}
    for name, limit in zip(NAMES[1:], LIMITS):
        assert ratios[name] <= limit, (name, ratios[name])


def _measure() -> tuple[Any, ...]:
    """On each rank, by name: seconds of each round, the gradient's error, bytes sent, CPU seconds."""
    tp = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = tp.get_local_rank()
    torch.manual_seed(0)
    full, labels = torch.randn(N, V), torch.randint(V, (N,))
    exact = full.double().requires_grad_()
    F.cross_entropy(exact, labels).backward()
    assert exact.grad is not None
    want = exact.grad.chunk(tp.size(), -1)[rank]
    # Not a leaf, as the output of a head isn't one: a leaf would copy its gradient.
    leaf = full.chunk(tp.size(), -1)[rank].clone().requires_grad_()
    logits = leaf.view_as(leaf)
    sharded = DTensor.from_local(logits, tp, [Shard(-1)], run_check=False)
    del full, exact

    def of_torch() -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(sharded, labels)
            return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def grad_of(loss: Callable[..., Tensor], **options: Any) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(
            loss(logits, labels, tp, **options), logits, retain_graph=True
        )[0]

    calls = dict(
        zip(NAMES, (grad_of(vocab_parallel_ce, vocab_size=V), grad_of(three_reduces), of_torch))
    )
    errors, sent = {}, {}
    for name, call in calls.items():
        errors[name] = float((call() - want).abs().max() / want.abs().max())
        with CollectiveLog() as log:
            call()
        sent[name] = sum(size * times for (_, size), times in log.calls.items())

    def clock() -> float:
        dist.barrier()
        return time.perf_counter()

    seconds = in_rounds(calls, rounds=ROUNDS, warmup=2, clock=clock)
    return seconds, errors, sent, interleaved(calls, rounds=max(ROUNDS // 3, 3))


def three_reduces(logits: Tensor, labels: Tensor, tp: DeviceMesh) -> Tensor:
    """The usual form, with one tensor of the logits' size, which becomes the gradient."""
    losses: Tensor = _ThreeReduces.apply(logits, labels, tp)  # type: ignore[no-untyped-call]
    return losses.sum() / (labels != -100).sum()


class _ThreeReduces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: DeviceMesh) -> Tensor:
        group, columns = tp.get_group(), logits.shape[1]
        first = tp.get_local_rank() * -(-V // tp.size())
        top = logits.amax(dim=-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        local = labels - first
        owned = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)[:, None]
        work = logits - top[:, None]
        target = work.gather(1, local)[:, 0].masked_fill_(~owned, 0.0)
        dist.all_reduce(target, group=group)
        total = work.exp_().sum(dim=-1)
        dist.all_reduce(total, group=group)
        ctx.work, ctx.total, ctx.local, ctx.owned = work, total, local, owned
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out = ctx.work.mul_((grad / ctx.total)[:, None])
        out.scatter_add_(1, ctx.local, (-grad).masked_fill(~ctx.owned, 0.0)[:, None])
        return out, None, None
