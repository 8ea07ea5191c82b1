"""One save, from its staging to what all ranks agree became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class Save:
    """One save; ``seq`` is the same on all ranks, and rises.

    Attributes:
        folder: Of the attempt, in the root.
        slot: While the writer reads it.
        failure: Of this rank, not yet agreed on.
        finished: This rank's part is written; on rank 0: the step is committed.
        done: All ranks know that it is committed.
        error: All ranks know that it failed, and why.
    """

    step: int
    seq: int
    folder: str
    slot: int | None = None
    failure: str | None = None
    finished: bool = False
    done: bool = False
    error: str | None = None


class SaveHandle:
    """A save under way, or done."""

    def __init__(self, save: Save, path: Path | str, wait: Callable[[Save], None]) -> None:
        self._save = save
        self._wait = wait
        self.path = path  # the folder that it becomes; a string if the root is a URL

    @property
    def step(self) -> int:
        return self._save.step

    @property
    def done(self) -> bool:
        """Whether it is committed, as far as this rank knows from its last poll, wait or save."""
        return self._save.done

    def wait(self) -> None:
        """Return once the step is durable on all ranks. All ranks call it.

        Raises:
            RuntimeError: It failed; on every rank.
        """
        self._wait(self._save)

    def __repr__(self) -> str:
        error, done = self._save.error, self._save.done
        state = f"failed: {error}" if error else "done" if done else "in flight"
        return f"SaveHandle(step={self.step}, {state}, path={str(self.path)!r})"


class SaveFailedError(RuntimeError):
    """Saves failed; raised on all ranks together, which may go on."""
