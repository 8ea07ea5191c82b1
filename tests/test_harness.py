import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import harness
from harness import distributed


@pytest.mark.parametrize("scale", [1.0, 3.0])
@distributed(world_size=2)
def test_ranks_communicate(scale):
    tensor = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    assert tensor.item() == 3 * scale


def test_run_returns_each_ranks_result():
    assert harness.run(_rank_and_tensor, 4, 10) == [10, 11, 12, 13]


def test_failure_shows_the_failing_ranks_traceback_and_output():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2.*only on rank 1.*printed by rank 1"):
        harness.run(_fail_on_rank_1, 2)


def test_a_rank_that_waits_for_a_failed_one_does_not_hang():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2"):
        harness.run(_fail_before_collective, 2)
    assert time.monotonic() - start < 20


def test_a_dead_rank_is_reported():
    with pytest.raises(AssertionError, match="rank 0 of 2: died without an answer"):
        harness.run(_die_on_rank_0, 2)


def test_a_hang_ends_at_the_timeout_with_the_stack():
    with pytest.raises(AssertionError, match=r"(?s)hung.*_sleep_forever"):
        harness.run(_sleep_forever, 2, timeout=1.0)


def test_warnings_are_errors_on_ranks():
    with pytest.raises(AssertionError, match="UserWarning: careful"):
        harness.run(_warn, 1)


def test_no_rank_outlives_its_test():
    pids = harness.run(_pid, 2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def _rank_and_tensor(start):
    return start + dist.get_rank()


def _fail_on_rank_1():
    print(f"printed by rank {dist.get_rank()}")
    if dist.get_rank() == 1:
        raise RuntimeError("only on rank 1")


def _fail_before_collective():
    if dist.get_rank() == 1:
        raise RuntimeError
    dist.all_reduce(torch.ones(1))


def _die_on_rank_0():
    if dist.get_rank() == 0:
        os.abort()


def _sleep_forever():
    time.sleep(1000)


def _warn():
    warnings.warn("careful", stacklevel=1)


def _pid():
    return os.getpid()
