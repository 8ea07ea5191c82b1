import statistics
import time

import pytest
import torch
import torch.distributed as dist

import harness


@pytest.mark.bench
def test_the_200th_test_is_as_fast_as_the_first():
    harness.run(_one_collective, 4)  # starts the server, imports
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        harness.run(_one_collective, 4)
        seconds.append(time.perf_counter() - start)
    first, last = statistics.median(seconds[:20]), statistics.median(seconds[-20:])
    print(
        f"\n4-rank test: first 20 {first:.3f} s, last 20 of 200 {last:.3f} s, ratio {last / first:.2f}"
    )
    assert last < 1.5 * first


def _one_collective():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
