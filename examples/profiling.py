"""Where time and memory go: torch.profiler, pyinstrument and memory snapshots, or nothing at all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

ROWS = 30  # of the table of operators
SNAPSHOT_EVENTS = 100_000  # allocations and frees that a snapshot looks back on


class Profiler(Protocol):
    """One call per step is all that the loop sees of it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None: ...

    def step(self) -> None: ...


def make_profiler(
    folder: Path,
    rank: int,
    *,
    profile: bool = False,
    wait: int = 1,
    warmup: int = 2,
    active: int = 3,
    repeat: int = 5,
    rank_zero_only: bool = False,
    memory: bool = True,
    shapes: bool = True,
    stack: bool = False,
    flops: bool = True,
    modules: bool = False,
    pyinstrument: bool = False,
    snapshot: bool = False,
) -> Profiler:
    """What was asked for, as one context with one ``step``; without a wish, one that does nothing.

    Files, named by rank: ``trace-<rank>-<cycle>.json`` for chrome://tracing or Perfetto, with a table of
    operators beside it as ``.txt``; ``pyinstrument-<rank>.html``; ``memory-<rank>.pickle`` for
    pytorch.org/memory_viz.

    Args:
        folder: Where the files go; created.
        rank: This process's.
        profile: Run torch.profiler; it wins over ``pyinstrument``, whose samples it would distort.
        wait: Steps without it at the start of each cycle.
        warmup: Then steps that are recorded and thrown away.
        active: Then steps that are kept.
        repeat: Cycles; 0: to the end.
        rank_zero_only: Only rank 0 profiles. Others then wait for it in collectives.
        memory: Record allocations, as below also shapes, Python stacks, FLOPs of matmuls and
            convolutions, and modules.
        shapes: See ``memory``.
        stack: See ``memory``; the dearest, and torch 2.13 can lose the tables of later cycles by it.
        flops: See ``memory``.
        modules: See ``memory``; by the same means as ``stack``.
        pyinstrument: Sample the Python stack for the whole run.
        snapshot: Keep the accelerator's allocations and write the last ones at the end, also when the
            run fails, as it does when memory runs out.
    """
    parts: list[Profiler] = []
    if rank_zero_only and rank:
        return _Several([])
    if profile:
        parts.append(
            _torch_profiler(
                folder,
                rank,
                schedule=torch.profiler.schedule(
                    wait=wait, warmup=warmup, active=active, repeat=repeat
                ),
                profile_memory=memory,
                record_shapes=shapes,
                with_stack=stack,
                with_flops=flops,
                with_modules=modules,
            )
        )
    elif pyinstrument:
        parts += _pyinstrument(folder, rank)
    if snapshot:
        parts += _snapshot(folder, rank)
    if parts:
        folder.mkdir(parents=True, exist_ok=True)
    return _Several(parts)


class _Several:
    """Contexts entered together; with none, the null context."""

    def __init__(self, parts: list[Profiler]) -> None:
        self.parts = parts

    def __enter__(self) -> Self:
        for part in self.parts:
            part.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for part in reversed(self.parts):
            part.__exit__(kind, error, traceback)

    def step(self) -> None:
        for part in self.parts:
            part.step()


class _AtEnd:
    """Starts on entry and writes on exit, whatever the reason."""

    def __init__(self, start: Callable[[], object], write: Callable[[], object]) -> None:
        self.start, self.write = start, write

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.write()

    def step(self) -> None:
        pass


def _torch_profiler(folder: Path, rank: int, **options: Any) -> Profiler:
    cycles = 0

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal cycles
        path = folder / f"trace-{rank}-{cycles}.json"
        cycles += 1
        device = torch.accelerator.current_accelerator()
        by = f"self_{device.type if device else 'cpu'}_time_total"
        try:
            profiler.export_chrome_trace(str(path))
            table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
            path.with_suffix(".txt").write_text(str(table))
        except Exception as error:  # a full disk, a bug of the profiler's: no reason to end the run
            print(f"profile {path} isn't whole: {error!r}"[:300], file=sys.stderr)

    # torch warns that a cycle's events are gone with it, which is what we want; and where warnings
    # are errors it then crashes, as it stops what wasn't started (torch 2.13).
    quiet = warnings.catch_warnings()

    def ignore() -> None:
        quiet.__enter__()
        warnings.filterwarnings(
            "ignore", message=".*Profiler clears events at the end of each cycle"
        )

    profiler: Profiler = torch.profiler.profile(on_trace_ready=write, **options)
    return _Several([_AtEnd(ignore, lambda: quiet.__exit__(None, None, None)), profiler])


def _pyinstrument(folder: Path, rank: int) -> list[Profiler]:
    try:
        sampler = import_module("pyinstrument").Profiler()
    except ImportError:
        print("no pyinstrument profile: pip install pyinstrument", file=sys.stderr)
        return []

    def write() -> None:
        sampler.stop()
        (folder / f"pyinstrument-{rank}.html").write_text(sampler.output_html())

    return [_AtEnd(sampler.start, write)]


def _snapshot(folder: Path, rank: int) -> list[Profiler]:
    device = torch.accelerator.current_accelerator()
    # Private, although it is the documented way; there is none for CPU and for some accelerators.
    memory = getattr(getattr(torch, device.type if device else "cpu"), "memory", None)
    record = getattr(memory, "_record_memory_history", None)
    dump = getattr(memory, "_dump_snapshot", None)
    if record is None or dump is None:
        where = device.type if device else "CPU"
        print(
            f"no memory snapshot: torch keeps no history of allocations on {where}", file=sys.stderr
        )
        return []

    def write() -> None:
        dump(str(folder / f"memory-{rank}.pickle"))
        record(enabled=None)

    return [_AtEnd(lambda: record(max_entries=SNAPSHOT_EVENTS), write)]
