"""The table of fused_linear_ce: time against the three matmuls, eager and other implementations; precision; memory.

One thread and CPU clock; ``PTX_BENCH_ROUNDS`` sets the number of rounds, ``PTX_BENCH_PEERS=0`` leaves the others out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interleaved import in_rounds, median_ratio
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ptx.loss import fused_linear_ce

# N, H, V, dtype; times the three matmuls, times eager.
SHAPES = [
    (2048, 1024, 32000, torch.float32, 1.06, 0.95),
    (2048, 1024, 32000, torch.bfloat16, 1.15, 0.80),
    (1024, 1024, 128256, torch.bfloat16, 1.20, 0.80),
    (1024, 512, 256128, torch.bfloat16, 1.35, 0.65),
]
ROUNDS = int(os.environ.get("PTX_BENCH_ROUNDS", "7"))
PEERS = os.environ.get("PTX_BENCH_PEERS", "1") == "1"
PEER_CHUNK = 1024  # tokens, of those that don't choose; F.linear_cross_entropy is fastest at half
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")  # other people's
@pytest.mark.parametrize(("n", "h", "v", "dtype", "floor_limit", "eager_limit"), SHAPES, ids=str)
def test_time(n, h, v, dtype, floor_limit, eager_limit):
    torch.manual_seed(0)
    hidden = torch.randn(n, h).to(dtype).requires_grad_()
    weight = (torch.randn(v, h) * h**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,))

    def floor() -> None:
        with torch.no_grad():
            logits = hidden @ weight.t()
            logits @ weight
            logits.t() @ hidden

    def step(loss: Loss) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            loss(hidden, weight, labels).backward()

        return run

    losses: dict[str, Loss] = {"eager": eager, "ptx.fused_linear_ce": fused_linear_ce}
    if PEERS:
        losses |= _peers()
    calls = {"floor": floor}
    for name, loss in losses.items():
        try:
            step(loss)()
        except Exception as error:  # not available here
            print(f"\n{name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        calls[name] = step(loss)
    seconds = in_rounds(calls, rounds=ROUNDS, warmup=1)
    print(f"\n{f'{n}, {h}, {v} {dtype}':44s} {'x floor':>8s} {'x eager':>8s}")
    ratios = {
        name: tuple(median_ratio(seconds[name], seconds[to]) for to in ("floor", "eager"))
        for name in calls
        if name != "floor"
    }
    for name, (to_floor, to_eager) in ratios.items():
        print(f"{name:44s} {to_floor:8.3f} {to_eager:8.3f}")
    print(f"{'limit of ptx':44s} {floor_limit:8.3f} {eager_limit:8.3f}")
    to_floor, to_eager = ratios["ptx.fused_linear_ce"]
    assert to_floor <= floor_limit
    assert to_eager <= eager_limit


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def _peers() -> dict[str, Loss]:
    """The same loss by others, as they are meant to be used."""
    peers: dict[str, Loss] = {
        "torch.compile of eager": torch.compile(eager, dynamic=False),
        "eager, chunks recomputed in the backward": _checkpointed,
    }
    if hasattr(F, "linear_cross_entropy"):
        options: Any = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=PEER_CHUNK // 2)
        peers[f"F.linear_cross_entropy, chunks of {PEER_CHUNK // 2}"] = lambda h, w, y: (
            F.linear_cross_entropy(h, w, y, options=options)
        )
    if all(importlib.util.find_spec(name) for name in ("cut_cross_entropy", "triton")):
        from cut_cross_entropy import linear_cross_entropy

        peers["cut-cross-entropy, torch_compile"] = lambda h, w, y: linear_cross_entropy(
            h, w, y, impl="torch_compile"
        )
    return peers


def _checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The form of several trainers: a chunk's logits are freed, and made again in the backward."""

    def chunk(states: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="sum")

    parts = zip(hidden.split(PEER_CHUNK), labels.split(PEER_CHUNK), strict=True)
    total = sum(checkpoint(chunk, *part, use_reentrant=False) for part in parts)
    return total / (labels != -100).sum()


@pytest.mark.bench
@pytest.mark.parametrize(("n", "h", "v"), [(2048, 256, 8000), (1024, 256, 32000)], ids=str)
def test_precision_in_bf16(n, h, v):
    """Errors against float64, of eager and of any number of chunks."""
    torch.manual_seed(0)
    hidden = torch.randn(n, h).bfloat16()
    weight = (torch.randn(v, h) * h**-0.5).bfloat16()
    labels = torch.randint(v, (n,))
    labels[::10] = -100
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    want = F.cross_entropy(F.linear(*exact), labels)
    want.backward()

    def errors(loss: Loss) -> tuple[float, float, float]:
        mine = [t.clone().requires_grad_() for t in (hidden, weight)]
        got = loss(*mine, labels)
        got.backward()
        dh, dw = (float((t.grad - e.grad).norm() / e.grad.norm()) for t, e in zip(mine, exact))
        return dh, dw, abs(got.item() / want.item() - 1)

    of_eager = errors(eager)
    print(f"\n{f'{n}, {h}, {v}':16s} {'dH':>9s} {'dW':>9s} {'loss':>9s}")
    print(f"{'eager':16s} " + " ".join(f"{error:9.2e}" for error in of_eager))
    for name, loss in _peers().items() if PEERS else ():
        try:
            print(" ".join(f"{error:9.2e}" for error in errors(loss)), "", name)
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}")
    table = {}
    for chunks in (1, 2, 8, 32, 128):
        rows = -(-n // chunks)
        table[chunks] = errors(lambda *t, r=rows: fused_linear_ce(*t, chunk_tokens=r))
        print(f"{f'{chunks} chunks':16s} " + " ".join(f"{e:9.2e}" for e in table[chunks]))
    for chunks, (dh, dw, loss) in table.items():
        assert dh <= 1.1 * of_eager[0], chunks
        assert dw <= 1.1 * of_eager[1], chunks
        assert loss <= 2e-5, chunks
        assert dw <= 1.05 * min(row[1] for row in table.values()), chunks


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
