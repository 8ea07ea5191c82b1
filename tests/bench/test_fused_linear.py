"""The table of fused_linear_ce: time against the three matmuls and against eager, memory, both on one thread."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interleaved import paired_ratio

from ptx.loss import fused_linear_ce

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


@pytest.mark.bench
@pytest.mark.parametrize("n", [2048, 8192])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 33), ("bfloat16", 52)])
def test_peak_memory(n, dtype, limit):
    """Beyond inputs, weight and both gradients, at H = 256 and V = 32000; it doesn't grow with N."""
    # mmap for all that is large, so that freed memory is gone.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(n), dtype]
    extra = float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
    print(f"\n{n}, 256, 32000 {dtype}: {extra:.1f} MiB (limit {limit})")
    assert extra <= limit


def _extra_memory(n, h, v, dtype):
    hidden = torch.randn(n, h).to(dtype).requires_grad_()
    weight = (torch.randn(v, h) * h**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,))
    for _ in range(2):  # the first call loads code
        hidden.grad = weight.grad = None
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        fused_linear_ce(hidden, weight, labels).backward()
        extra = _status("VmHWM") - before
    return extra - (hidden.nbytes + weight.nbytes) / 2**20


def _status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(_extra_memory(int(sys.argv[1]), 256, 32000, getattr(torch, sys.argv[2])))
