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
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(warmup + rounds):
        for name, call in candidates.items():
            start = clock()
            call()
            if round_ >= warmup:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def paired_ratio(
    call: Callable[[], object],
    floor: Callable[[], object],
    *,
    rounds: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Median over rounds of ``call``'s time / ``floor``'s, measured one right after the other, in alternating order."""
    ratios = []
    for round_ in range(warmup + rounds):
        seconds = {}
        for fn in (call, floor) if round_ % 2 else (floor, call):
            start = clock()
            fn()
            seconds[fn] = clock() - start
        if round_ >= warmup:
            ratios.append(seconds[call] / seconds[floor])
    return statistics.median(ratios)
