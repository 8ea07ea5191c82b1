"""A process that saves one step after the other until it is killed, and what must be there then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ckpt.small import Small, save_filled, writer_pid
from ptx.ckpt import AsyncCheckpointer, verify


class SavingJob:
    """A fork of this process that saves steps from ``first`` on.

    Args:
        opened: Makes its checkpointer.
        folder: For a note.
        first: Is committed before the job is ``ready``.
        size: Of the state, see `Small`.
        block: Whether each save waits until it is durable; otherwise as many as can be are in flight.
    """

    def __init__(
        self,
        opened: Callable[[], AsyncCheckpointer],
        folder: Path,
        first: int,
        *,
        size: int,
        block: bool = False,
    ) -> None:
        self._note = folder / "writer"
        self._note.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._save_on(opened(), Small(size=size), first, block)
            finally:
                os._exit(1)

    @property
    def ready(self) -> bool:
        return self._note.exists()

    @property
    def writer(self) -> int:
        """The pid of its writer, once it is ready."""
        return int(self._note.read_text())

    def kill(self, *pids: int) -> None:
        """SIGKILL for each; one of them is the job."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _save_on(
        self, checkpointer: AsyncCheckpointer, small: Small, first: int, block: bool
    ) -> None:
        save_filled(checkpointer, small, first)
        new = self._note.with_suffix(".new")
        new.write_text(str(writer_pid(checkpointer)))
        new.rename(self._note)
        for step in range(first + 1, first + 1000):
            small.fill(step)
            checkpointer.save(step, small.state, block=block)
            checkpointer.poll()


def newest_whole_step(
    opened: Callable[[], AsyncCheckpointer], older: int, *, size: int, where: str
) -> int:
    """The step that loads now: the newest there, whole, and newer than ``older``."""
    small = Small(size=size)
    with opened() as checkpointer:
        assert verify(checkpointer.root).ok, where
        step = checkpointer.load(small.state) or 0
        assert step == checkpointer.steps()[-1] > older, where
        assert small.values() == {float(step)}, where
    return step
