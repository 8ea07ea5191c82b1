"""Compare the speed of callables on a noisy machine: in turn, in one run, as ratios of medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds of each candidate, all of them run once per round so that noise hits them alike.

    ``clock``: process CPU time by default, which other processes disturb least; with ranks or I/O, use
    ``time.perf_counter``.
    """
    seconds = in_rounds(candidates, rounds=rounds, warmup=warmup, clock=clock)
    return {name: statistics.median(values) for name, values in seconds.items()}


def in_rounds(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; every round starts with another one."""
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            candidates[name]()
            if round_ >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def median_ratio(seconds: list[float], floor: list[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds, floor, strict=True))


def paired_ratio(
    call: Callable[[], object],
    floor: Callable[[], object],
    *,
    rounds: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Median over rounds of ``call``'s time / ``floor``'s, measured one right after the other, in alternating order."""
    seconds = in_rounds({"call": call, "floor": floor}, rounds=rounds, warmup=warmup, clock=clock)
    return median_ratio(seconds["call"], seconds["floor"])
