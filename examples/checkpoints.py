"""When a run saves, and when it stops early: every so many steps, at its end, on SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

import ptx


class Saves:
    """A checkpointer, or nothing at all without a folder.

    Args:
        root: Where the checkpoints go; None: nothing is saved or loaded.
        interval: Steps between saves; 0: only the last step's.
        keep: How many to keep; None: all.
        keep_every: Steps that this divides are kept as well.
        stage_dir: A fast folder of this node to write to first; needed if ``root`` is a URL.
    """

    def __init__(
        self,
        root: Path | str | None,
        interval: int,
        keep: int | None,
        *,
        keep_every: int | None = None,
        stage_dir: Path | None = None,
    ) -> None:
        self.checkpointer = None
        if root is not None:
            self.checkpointer = ptx.AsyncCheckpointer(
                root, keep=keep, keep_every=keep_every, stage_dir=stage_dir
            )
        self.interval = interval
        self.stopping = False
        self._asked_to_stop = False
        self._handlers: dict[int, Any] = {}
        if self.checkpointer:  # without one the signals end the process, as ever
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._stop)

    def resume(self, state: Mapping[str, Any]) -> int:
        """Loads the newest checkpoint; returns its step, 0 if there is none."""
        return (self.checkpointer.load(state) if self.checkpointer else None) or 0

    def after(self, step: int, state: Mapping[str, Any], *, last: bool) -> dict[str, float]:
        """Saves if it is time to; ``stopping`` then says whether the run has to end here."""
        if self.checkpointer is None:
            return {}
        self.checkpointer.poll()
        # Ranks hear the signal in different steps, and have to stop after the same one.
        asked = torch.tensor(int(self._asked_to_stop))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        self.stopping = bool(asked)
        if not (self.stopping or last or (self.interval and step % self.interval == 0)):
            return {}
        started = time.perf_counter()
        self.checkpointer.save(step, state)
        return {"train/ckpt_stage_seconds": time.perf_counter() - started}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.checkpointer:  # finishes what is in flight
            self.checkpointer.__exit__(kind, error, traceback)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        self._asked_to_stop = True
        if number == signal.SIGINT:  # a second Ctrl-C ends the run at once; clusters repeat SIGTERM
            signal.signal(number, self._handlers[number])
