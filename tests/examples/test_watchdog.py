"""A process in which nothing moves names its rank, last step and stacks, and ends with 124."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import harness
import watchdog
from watchdog import Watchdog

EXAMPLES = Path(watchdog.__file__).parent


def run(body):
    """A process of its own, without torch."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(EXAMPLES)!r}); from watchdog import *\n{body}"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )


def test_nothing_moves():
    done = run(
        "def stuck(): time.sleep(60)\n"
        "with Watchdog(0.2, 3, 8) as dog:\n"
        "    dog.beat(16); dog.beat(17); stuck()"
    )
    assert done.returncode == watchdog.EXIT_CODE == 124
    said = (
        "watchdog: rank 3 of 8: nothing moved for 0.[0-9] s while training; last step 17. Stacks:"
    )
    assert re.search(said, done.stderr)
    assert "in stuck" in done.stderr


def test_no_alarm_before_the_first_step_nor_while_saving_nor_while_steps_come():
    done = run(
        "with Watchdog(0.4, slow_seconds=10) as dog:\n"
        "    time.sleep(0.5); dog.beat(1)\n"
        "    with dog.slow('saving'): time.sleep(0.5)\n"
        "    for step in range(8): time.sleep(0.07); dog.beat(step)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_zero_seconds_are_no_watchdog():
    before = threading.active_count()
    with Watchdog(0) as dog:
        dog.beat(1)
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(9)", "while starting; no step was done"),
        ("dog.beat(5)\n    with dog.slow('saving'): time.sleep(9)", "while saving; last step 5"),
        ("with dog.slow('saving'): pass\n    time.sleep(9)", "while starting"),
    ],
)
def test_what_takes_long_has_a_limit_too(body, said):
    done = run(f"with Watchdog(0.1, slow_seconds=0.3) as dog:\n    {body}")
    assert done.returncode == 124
    assert said in done.stderr


def test_after_saving_the_limit_is_that_of_a_step_again():
    done = run(
        "with Watchdog(0.1, slow_seconds=60) as dog:\n"
        "    dog.beat(1)\n    with dog.slow('saving'): pass\n    time.sleep(9)"
    )
    assert done.returncode == 124
    assert "while training; last step 1" in done.stderr


def test_a_rank_that_moves_again_goes_on(capfd, monkeypatch):
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: pytest.fail(f"exit {code}"))
    with Watchdog(0.2) as dog:
        dog.beat(1)
        deadline = time.monotonic() + 10
        while "Stacks" not in (said := capfd.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.005)
        dog.beat(2)
        assert "Stacks" in said
        said = ""
        while "moves again" not in said and time.monotonic() < deadline:
            dog.beat(3)
            time.sleep(0.02)
            said += capfd.readouterr().err
    assert "rank 0 of 1: moves again" in said
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def some_ranks_stop(seconds):
    rank = dist.get_rank()
    with Watchdog(seconds, rank, dist.get_world_size()) as dog:
        for step in range(1, 100):
            if rank == 1 and step == 4:
                read_data_that_never_comes()
            dist.all_reduce(torch.ones(1))
            dog.beat(step)


def read_data_that_never_comes():
    threading.Event().wait(100)


def test_one_blocked_rank_of_two_is_named():
    with pytest.raises(AssertionError) as failure:
        harness.run(some_ranks_stop, 2, 0.3, timeout=20)
    text = str(failure.value)
    assert text.count("died without an answer") == 2
    first, second = text.split("--- rank 1 of 2:")
    assert "rank 0 of 2: nothing moved" in first
    assert "last step 3. Stacks:" in first
    assert "all_reduce" in first
    assert "rank 1 of 2: nothing moved" in second
    assert "last step 3. Stacks:" in second
    assert "in read_data_that_never_comes" in second
    assert "in read_data_that_never_comes" not in first
