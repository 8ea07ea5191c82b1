"""The parts of a step: wall time on CPU, events that are only read once they have passed elsewhere."""

import pytest
import torch

import timing
from timing import StepTimer


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def test_means_per_step_since_they_were_read(clock):
    timer = StepTimer(torch.device("cpu"))

    def batches():
        for _ in range(3):
            clock.now += 1
            yield "batch"

    steps = timer.data(batches())
    assert timer.flat() == {}
    for _ in range(2):
        assert next(steps) == "batch"
        for _ in range(2):  # micro-batches
            with timer.part("forward"):
                clock.now += 10
            with timer.part("backward"):
                clock.now += 20
        clock.now += 5
    with timer.paused():
        clock.now += 1000
    assert timer.flat() == {"train/dt": 66, "train/dtd": 1, "train/dtf": 20, "train/dtb": 40}
    assert list(steps) == ["batch"]
    clock.now += 3
    assert timer.flat() == {"train/dt": 4, "train/dtd": 1, "train/dtf": 0, "train/dtb": 0}


def test_events_are_read_once_they_have_passed_and_never_waited_for(clock, monkeypatch):
    device_time, passed, waits = [0.0], [0.0], []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device_time[0]

        def query(self):
            return self.at <= passed[0]

        def elapsed_time(self, other):
            assert other.query()
            return other.at - self.at

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    timer = StepTimer(torch.device("cuda"))
    for _ in timer.data(range(4)):
        with timer.part("forward"):
            device_time[0] += 1000  # milliseconds
        with timer.part("backward"):
            device_time[0] += 2000
        passed[0] = device_time[0] - 1  # the last backward hasn't passed
    assert len(timer._pending) == 3  # of 8: what was in flight at the last look
    assert waits == []
    passed[0] += 1
    seconds = timer.flat()
    assert (seconds["train/dtf"], seconds["train/dtb"]) == (1.0, 2.0)
    with timer.paused():
        pass
    assert len(waits) == 2
