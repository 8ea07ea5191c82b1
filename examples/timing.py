"""Where the time of a step goes, without waiting for the device more often than the loop does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")
Part = Literal["forward", "backward"]


class StepTimer:
    """Mean seconds per step since they were last read.

    On CPU all parts are wall time. On an accelerator the host runs ahead, so "forward" and
    "backward" are taken by events on the stream, which are read once they have passed; they add two
    records of about a microsecond each. The rest of a step (clipping, optimizer, logging) is what is
    missing from "train/dt". What can't be had without a wait isn't here: the time of collectives
    alone, which overlap with computation (`profiling.py` shows it), and on an accelerator the host's
    share; there "train/dtd" (waiting for data) may pass while the device is busy, and costs nothing.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started, self._paused, self._steps = time.perf_counter(), 0.0, 0
        self._seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}
        self._pending: list[tuple[Part, Any, Any]] = []  # events, oldest first

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; counts steps, and the time until each batch is there."""
        source = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._seconds["data"] += time.perf_counter() - started
            self._steps += 1
            yield batch

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Times what is inside, as one of several if a step has micro-batches."""
        if self.device.type == "cpu":
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        first, last = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((name, first, last))
        self._collect()  # so that a long time between two logs doesn't pile them up

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what isn't training, such as validation: left out. Waits for the device."""
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self._paused += time.perf_counter() - started

    def flat(self) -> dict[str, float]:
        """Reads and starts anew. Call it where the loop has just waited for the device (a loss read).

        Returns:
            "train/dt": the whole step; "train/dtd": waiting for data; "train/dtf", "train/dtb": forward
            and backward, with the collectives that they wait for. Seconds, this rank's; {} before
            the first step.
        """
        self._collect()
        if not self._steps:
            return {}
        now = time.perf_counter()
        whole = now - self._started - self._paused
        seconds = {
            "train/dt": whole,
            "train/dtd": self._seconds["data"],
            "train/dtf": self._seconds["forward"],
            "train/dtb": self._seconds["backward"],
        }
        means = {name: value / self._steps for name, value in seconds.items()}
        self._started, self._paused, self._steps = now, 0.0, 0
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return means

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            name, first, last = self._pending.pop(0)
            self._seconds[name] += first.elapsed_time(last) / 1e3  # from milliseconds

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
