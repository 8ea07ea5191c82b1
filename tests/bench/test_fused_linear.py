"""The table of fused_linear_ce: time against the three matmuls and against eager, memory, both on one thread."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from interleaved import paired_ratio

from ptx.loss._fused_linear import fused_linear_ce

# N, H, V, dtype; times the three matmuls, times eager.
SHAPES = [
    (2048, 1024, 32000, torch.float32, 1.06, 0.95),
    (2048, 1024, 32000, torch.bfloat16, 1.15, 0.80),
    (1024, 1024, 128256, torch.bfloat16, 1.20, 0.80),
    (1024, 512, 256128, torch.bfloat16, 1.35, 0.65),
]
ROUNDS = int(os.environ.get("PTX_BENCH_ROUNDS", "7"))


@pytest.mark.bench
@pytest.mark.parametrize(("n", "h", "v", "dtype", "floor_limit", "eager_limit"), SHAPES, ids=str)
def test_time(n, h, v, dtype, floor_limit, eager_limit):
    torch.manual_seed(0)
    hidden = torch.randn(n, h).to(dtype).requires_grad_()
    weight = (torch.randn(v, h) * h**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,))

    def floor():
        with torch.no_grad():
            logits = hidden @ weight.t()
            logits @ weight
            logits.t() @ hidden

    def run(loss):
        hidden.grad = weight.grad = None
        loss().backward()

    def eager():
        run(lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels))

    def fused():
        run(lambda: fused_linear_ce(hidden, weight, labels))

    to_floor = paired_ratio(fused, floor, rounds=ROUNDS, warmup=1)
    to_eager = paired_ratio(fused, eager, rounds=ROUNDS, warmup=1)
    print(
        f"\n{n}, {h}, {v} {dtype}: {to_floor:.3f} x floor (limit {floor_limit}),"
        f" {to_eager:.3f} x eager (limit {eager_limit})"
    )
    assert to_floor <= floor_limit
    assert to_eager <= eager_limit
