"""What the example's metrics cost, against the step that they describe; one process and two ranks."""

import statistics
import time

import pytest
import torch

import harness
import ptx
from across_ranks import across_ranks
from batch_stats import batch_stats
from timing import StepTimer

ROUNDS, LOG_EVERY = 15, 10  # the example's default


@pytest.mark.bench
@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_take_less_than_a_hundredth_of_the_time(ranks):
    logged, each, step = map(max, zip(*harness.run(_measure, ranks, timeout=300)))
    share = (logged / LOG_EVERY + each) / step
    print(
        f"\n{ranks} ranks: a logged step's metrics {1e3 * logged:.1f} ms, any step's"
        f" {1e6 * each:.0f} us, of {1e3 * step:.0f} ms: {share:.2%} when every {LOG_EVERY}th is logged"
    )
    assert share < 0.01


def _measure():
    mesh = ptx.build_mesh(device_type="cpu")
    with torch.device("meta"):
        model = ptx.Transformer(ptx.preset("debug"))
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, labels = torch.randint(4096, (2, 16 // mesh["dp_shard"].size(), 256))
    timer = StepTimer(torch.device("cpu"))

    def step():
        hidden = model(tokens, return_hidden=True)
        ptx.fused_linear_ce(hidden, model.output, labels).backward()
        optimizer.step()

    def logged():
        numbers = timer.flat() | ptx.model_stats(model).flat()
        numbers |= batch_stats(tokens, labels, ptx.loss_mesh(mesh))
        memory = ptx.memory_report("cpu").flat()
        return numbers | memory | across_ranks(memory)

    def each():
        for name in ("forward", "backward"):
            with timer.part(name):
                pass

    seconds = {step: [], logged: [], each: []}
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        for call, times in seconds.items():
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return tuple(statistics.median(seconds[call]) for call in (logged, each, step))
