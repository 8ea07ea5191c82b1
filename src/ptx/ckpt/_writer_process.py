"""The trainer's end of its writer process: start it, send jobs, read reports, notice its death."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ptx.ckpt._store import is_url

COMMIT_SECONDS = 1800.0  # that rank 0 waits for the parts of other ranks: torch's group timeout
ORPHAN_SECONDS = 60.0  # the same, once its own trainer is gone or leaving
STOP_SECONDS = 10.0  # for a writer without a job to exit


class WriterProcess:
    """One writer, started at once.

    Args:
        root: Where the steps are: a folder, or a URL.
        rank: This rank in the checkpointer's group.
        slots: memfds that hold the bytes to write.
        stage: A folder to write to first; None: none.
        run: The same on all ranks of this run, and of no other.
        lock: Rank 0's: of the root.
    """

    def __init__(
        self,
        root: str,
        rank: int,
        slots: Sequence[int],
        *,
        stage: str | None = None,
        run: str = "",
        lock: str = "",
    ) -> None:
        if not sys.executable:
            raise RuntimeError("AsyncCheckpointer: sys.executable is empty, so no writer can start")
        here = Path(__file__).parent
        config = {
            "root": root,
            "rank": rank,
            "slots": list(slots),
            "stage": stage,
            "run": run,
            "lock": lock,
            "parent": os.getpid(),
            "commit_seconds": COMMIT_SECONDS,
            "orphan_seconds": ORPHAN_SECONDS,
            "ptx": str(here.parents[1]),
            "path": _paths(root),
        }
        self._errors = os.memfd_create("ptx-writer-stderr")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(here / "_writer.py"), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=slots,
            bufsize=0,
            # A launcher kills the trainer's process group. The writer should survive that, and finish.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._rest = b""
        self.ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, job: dict[str, Any]) -> None:
        """Raises OSError if the writer is dead."""
        self._stdin.write(json.dumps(job).encode() + b"\n")

    def reports(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """What it reported since the last call; sets ``ended`` once it is dead and all is read.

        Args:
            seconds: To wait for something to read.
        """
        if seconds and not self.ended:
            select.select([self._stdout], [], [], seconds)
        while not self.ended:
            try:
                data = os.read(self._stdout.fileno(), 2**16)
            except BlockingIOError:
                break
            self.ended = not data
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def why(self) -> str:
        """How it died, with the end of what it printed."""
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        size = os.lseek(self._errors, 0, os.SEEK_END)
        text = os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace").strip()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {text}" if text else how

    def finish(self) -> None:
        """Send no more: it finishes what it has and exits."""
        if not self._stdin.closed:
            with contextlib.suppress(OSError):
                self.send({"finish": True})
            self._stdin.close()

    def stop(self) -> None:
        """End it and free its descriptors; it is killed if it doesn't exit."""
        self.finish()
        deadline = time.monotonic() + STOP_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            self.reports()  # so that it doesn't wait for room in the pipe
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._stdout.close()
        os.close(self._errors)
        self.ended = True


def _paths(root: str) -> list[str]:
    """Where the writer finds xxhash, and whatever fsspec needs for a URL."""
    path = str(Path(xxhash.__file__).parents[1])
    return [path, *filter(None, sys.path)] if is_url(root) else [path]
