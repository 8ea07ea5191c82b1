"""Ends a process in which nothing moves, after naming its rank, its last step and where it stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

EXIT_CODE = 124  # as timeout(1); torchrun takes it for a failure, and restarts if it may
STDERR = 2  # faulthandler wants a file descriptor
GRACE_SECONDS = 5.0  # at most, so that every rank has printed before torchrun ends them all


class Watchdog:
    """A thread that expects `beat` after each step.

    One rank that stands still stops all, in their collectives. Each then names itself; the one to look
    at is the one whose stack isn't in a collective, often with an earlier step. On an accelerator the
    host runs ahead, and stands still where it next reads a number.

    No false alarm: before the first `beat` (imports, compilation), and inside `slow` (saving,
    validation, compilation of its shapes), the limit is ``slow_seconds``. A rank that moves on in the few
    seconds between the stacks and the exit is left alone.

    The thread needs Python's lock: it can't report code that waits without releasing it (torch's
    collectives and synchronisations do release it).

    Args:
        seconds: Without a beat, until the alarm; above any step's time. 0: there is no watchdog.
        rank: Of this process, for the message.
        world: Number of processes, for the message.
        slow_seconds: As ``seconds`` where things take long; the larger of both counts.
    """

    def __init__(
        self, seconds: float, rank: int = 0, world: int = 1, *, slow_seconds: float = 1800.0
    ) -> None:
        self.seconds, self.slow_seconds = seconds, max(slow_seconds, seconds)
        self.rank, self.world = rank, world
        self._last_step: int | None = None
        # (since when, what is done, limit): one object, so that the thread never sees half of a change.
        self._state = (time.monotonic(), "starting", self.slow_seconds)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int) -> None:
        """Says that ``step`` is done."""
        self._last_step = step
        self._set("training", self.seconds)

    @contextmanager
    def slow(self, doing: str) -> Iterator[None]:
        """Gives what is inside ``slow_seconds``, and a name in the message: "saving"."""
        _, before, limit = self._state
        self._set(doing, self.slow_seconds)
        try:
            yield
        finally:
            self._set(before, limit)

    def __enter__(self) -> Self:
        if self.seconds > 0:
            self._set("starting", self.slow_seconds)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _set(self, doing: str, limit: float) -> None:
        self._state = (time.monotonic(), doing, limit)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 10)):
            state = since, doing, limit = self._state
            waited = time.monotonic() - since
            if waited < limit:
                continue
            last = "no step was done" if self._last_step is None else f"last step {self._last_step}"
            self._say(f"nothing moved for {waited:.1f} s while {doing}; {last}. Stacks:")
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            if self._stop.wait(min(GRACE_SECONDS, self.seconds)):
                return
            if self._state is state:
                os._exit(EXIT_CODE)  # sys.exit would end this thread alone
            self._say("moves again")

    def _say(self, text: str) -> None:
        print(f"watchdog: rank {self.rank} of {self.world}: {text}", file=sys.stderr, flush=True)
