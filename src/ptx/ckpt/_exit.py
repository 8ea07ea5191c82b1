"""What is in flight when nobody closes a checkpointer: finished when it is dropped, and at exit."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ptx.ckpt._in_flight import InFlight

if TYPE_CHECKING:
    from ptx.ckpt._checkpointer import AsyncCheckpointer


def finish_dropped(flight: InFlight, pid: int) -> None:
    """For who never called close."""
    if os.getpid() == pid:
        problems = flight.finish_alone()
        flight.close()
        if problems:
            sys.stderr.write(f"AsyncCheckpointer: dropped with {'; '.join(problems)}\n")


def at_exit_hook(reference: weakref.ref[AsyncCheckpointer], pid: int) -> Callable[[], None]:
    """Registers, and returns, a function that finishes and ends with exit code 1 if it can't."""

    def at_exit() -> None:
        it = reference()
        if it is None or it._closed or os.getpid() != pid:
            return
        problems = it._flight.finish_alone()
        it._flight.close()
        if problems:
            sys.stderr.write(f"AsyncCheckpointer: unfinished at exit: {'; '.join(problems)}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception here would leave the exit code at 0

    atexit.register(at_exit)
    return at_exit
