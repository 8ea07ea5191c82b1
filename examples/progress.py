"""What a person watching a run sees: one line that renews itself on a terminal, plain lines in a file."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

BAR = 20  # characters
ERASE = "\r\x1b[2K"  # to the start of the line, and clear it (ECMA-48)


class Progress:
    """Shows how far a run is, and when it will end.

    Args:
        total: Steps of the run.
        done: Steps done before it, by a run that it goes on from.
        stream: Where to; None: standard output. On a terminal the line is rewritten in place.
    """

    def __init__(self, total: int, *, done: int = 0, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.total, self._line = total, ""
        self._since, self._from = time.perf_counter(), done
        self._first = True
        self.live = self.stream.isatty()

    def step(self, done: int, text: str) -> None:
        """Shows that ``done`` steps are done, with ``text`` about the last one."""
        text = f"{text}  ETA {self.eta(done)}"
        if not self.live:
            return self._write(f"step {done:5d}/{self.total}  {text}\n")
        filled = min(BAR, BAR * done // max(1, self.total))
        line = f"[{'#' * filled}{'-' * (BAR - filled)}] {done}/{self.total}  {text}"
        # One character less than the width, or some terminals wrap.
        self._line = line[: shutil.get_terminal_size().columns - 1]
        self._write(ERASE + self._line)

    def say(self, text: str) -> None:
        """A line that stays, above the one that is rewritten."""
        self._write(f"{ERASE}{text}\n{self._line}" if self.live and self._line else f"{text}\n")

    def close(self) -> None:
        """Leaves the last line standing."""
        if self.live and self._line:
            self._line = ""
            self._write("\n")

    def eta(self, done: int) -> str:
        """Time left, by the mean step since the first call: that one's step may have compiled."""
        now = time.perf_counter()
        each = (now - self._since) / max(1, done - self._from)
        if self._first:
            self._first, self._since, self._from = False, now, done
        seconds = round(each * max(0, self.total - done))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return (
            f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
        )

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
