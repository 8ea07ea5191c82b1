"""Saves that are being written: their slots and writer, and what all ranks agree became of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptx.ckpt._lock import RootLock
from ptx.ckpt._ranks import Maximum, Ranks
from ptx.ckpt._saves import Save, SaveFailedError
from ptx.ckpt._slots import Layout, Slot
from ptx.ckpt._store import Store, is_url
from ptx.ckpt._writer_process import WriterProcess

LOG = logging.getLogger("ptx.ckpt")
LOOK_SECONDS = 0.002  # between rounds of a wait, if the writer reports nothing


class InFlight:
    """The saves of one checkpointer that aren't settled yet.

    Ranks agree by all-reduces of three integers: whether one has a failure, whether one has no free
    slot, and the last save that rank 0 committed. Each is started by one poll and read by the next,
    so nobody waits; what it says is the same on all ranks, so all raise in the same poll.
    """

    def __init__(self, store: Store, ranks: Ranks, slots: int, stage: str | None) -> None:
        self.store = store
        self.ranks = ranks
        self.lock = RootLock(store.lock_file(), store.root)
        self.damaged: list[str] = []  # attempts that a load found damaged
        self._stage = stage
        self._run = ""
        self.slots = [Slot() for _ in range(slots)]
        self.pending: list[Save] = []
        self._users: list[Save | None] = [None] * slots
        self._writer: WriterProcess | None = None
        self._fresh = False  # the writer has had no job yet
        self._round: Maximum | None = None
        self._seq = 0

    def poll(self) -> None:
        """Read the last round, and start the next one if something is in flight."""
        if self._writer is None:  # which does it otherwise
            self.lock.beat()
        self._take(0.0)
        self._read_round()
        if self.pending:
            self._start_round()

    def wait(self, settled: Callable[[], bool]) -> None:
        while not settled():
            self._take(0.0)
            self._read_round()
            if self.pending:
                self._start_round()
                self._read_round()
            if not settled():
                self._take(LOOK_SECONDS)

    def wait_for_all(self) -> None:
        """Raises only once nothing is in flight, whatever failed before."""
        problems = []
        while True:
            try:
                self.wait(lambda: not self.pending)
            except SaveFailedError as problem:
                problems.append(str(problem))
            else:
                break
        if problems:
            raise SaveFailedError("; ".join(problems))

    def wait_for(self, save: Save) -> None:
        self.wait(lambda: save not in self.pending)
        if save.error is not None:
            raise SaveFailedError(f"save of step {save.step} failed: {save.error}")

    def acquire(self, wait: bool) -> int | None:
        """A slot that is free here, while one is on every rank; None if not, and not to wait."""
        while True:
            self._take(0.0)
            self._read_round()
            mine = next((i for i, user in enumerate(self._users) if user is None), None)
            self._start_round()
            if not self._read_round():
                return mine
            if not wait:
                return None
            self._take(LOOK_SECONDS)

    def lay_out(self, layout: Layout, sections: int) -> None:
        """Allocate all free slots now: at the first save, rather than when memory has become short."""
        for slot, user in zip(self.slots, self._users):
            if user is None:
                slot.lay_out(layout, sections)

    def add(self, step: int, folder: str) -> Save:
        """A new save, which is in flight from now on."""
        self._seq += 1
        self.pending.append(Save(step, self._seq, folder))
        return self.pending[-1]

    def becomes(self, save: Save) -> Path | str:
        path = self.store.committed_path(save.step, save.folder)
        return path if is_url(path) else Path(path)

    def write(self, save: Save, slot: int, sections: list[bytes], job: dict[str, Any]) -> None:
        """Hand a staged slot to the writer."""
        at = job["data_bytes"]
        for section in sections:
            self.slots[slot].put(at, section)
            at += len(section)
        self._send(
            {
                **job,
                "seq": save.seq,
                "step": save.step,
                "folder": save.folder,
                "slot": slot,
                "slot_bytes": self.slots[slot].size,
                "sections": [len(section) for section in sections],
                "world_size": self.ranks.size,
                "damaged": self.damaged,
            }
        )
        save.slot, self._users[slot] = slot, save

    def finish_alone(self) -> list[str]:
        """Without other ranks: have the writer finish and exit; returns what it couldn't."""
        if self._writer is not None:
            self._writer.finish()
        while self._writer is not None:
            self._take(1.0)
        return [
            f"step {one.step}: {one.failure or 'not written'}"
            for one in self.pending
            if not one.finished
        ]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        for slot in self.slots:
            slot.free()
        self.slots = []
        self.lock.release()

    def _send(self, job: dict[str, Any]) -> None:
        if self._writer is None:
            self._run = self._run or job["folder"].rpartition("-")[2]  # equal on all ranks
            self._writer = WriterProcess(
                self.store.root,
                self.ranks.rank,
                [slot.fd for slot in self.slots],
                stage=self._stage,
                run=self._run,
                lock=self.lock.token,
            )
            self._fresh = True
        old: list[str] = []
        if self._fresh and self.ranks.rank == 0:
            # Listed now: a later save's folder must not be among them when the writer gets to it.
            own = {one.folder for one in self.pending}
            old = [name for name in self.store.leftovers() if name not in own]
            self._warn_of_newer(job["step"])
        self._writer.send({**job, "leftovers": old})
        self._fresh = False

    def _warn_of_newer(self, step: int) -> None:
        store = self.store
        newer = sorted({n for n, path in store.folders() if n > step and store.has_manifest(path)})
        if newer:
            LOG.warning(
                "step %d is saved beside newer ones, %s: load() still takes the newest and `keep` counts"
                " them; delete them, or go on in another folder",
                step,
                newer,
            )

    def _take(self, seconds: float) -> None:
        """Take the writer's reports, after waiting at most so long for the first."""
        if self._writer is None:
            return
        by_seq = {one.seq: one for one in [*self._users, *self.pending] if one is not None}
        for report in self._writer.reports(seconds):
            if (one := by_seq.get(report["seq"])) is None:
                continue
            event = report["event"]
            if event in ("unwritten", "failed"):
                one.failure = one.failure or report["text"]
            elif event == "committed" or (event == "written" and self.ranks.rank > 0):
                one.finished = True
            if event in ("unwritten", "staged", "written"):
                self._release(one)
        if self._writer.ended:
            self._bury(self._writer)

    def _bury(self, writer: WriterProcess) -> None:
        """What a dead writer hasn't finished has failed; the next save starts another."""
        how = writer.why()
        writer.stop()
        self._writer = None
        for one in self.pending:
            if not one.finished and not one.failure:
                if self.ranks.rank == 0 and self.store.is_committed(one.step, one.folder):
                    one.finished = True  # it died before it could say so
                else:
                    one.failure = f"the writer process died ({how})"
        for one in filter(None, list(self._users)):
            self._release(one)
        if not self.pending and how != "exit code 0":
            LOG.warning("the idle writer process died (%s); the next save starts another", how)

    def _release(self, one: Save) -> None:
        if one.slot is not None:
            self._users[one.slot] = None
            one.slot = None

    def _start_round(self) -> None:
        finished = [one.seq for one in self.pending if one.finished]
        numbers = [
            int(any(one.failure for one in self.pending)),
            int(None not in self._users),
            max(finished, default=0) if self.ranks.rank == 0 else 0,
        ]
        self._round = self.ranks.start_max(numbers)

    def _read_round(self) -> bool:
        """Whether some rank had no free slot. Raises on all ranks if a save failed on one."""
        if self._round is None:
            return False
        failed, no_slot, committed = self._round.result()
        self._round = None
        try:
            # First: a later save may be committed after one that failed.
            if failed:
                self._agree_on_failures()
        finally:
            for one in [one for one in self.pending if one.seq <= committed]:
                one.done = True
                self.pending.remove(one)
                self._release(one)  # this rank's report of its part may come later
        return bool(no_slot)

    def _agree_on_failures(self) -> None:
        mine = {one.seq: one.failure for one in self.pending if one.failure}
        committed = {one.seq for one in self.pending if one.finished and self.ranks.rank == 0}
        answers = self.ranks.gather_objects((mine, committed))
        texts: dict[int, list[str]] = {}
        for rank, (failures, _) in enumerate(answers):
            for seq, text in failures.items():
                texts.setdefault(seq, []).append(f"rank {rank}: {text}")
        # A writer that died behind its part has spoilt nothing, if the step is committed.
        failed = [one for one in self.pending if one.seq in texts.keys() - answers[0][1]]
        for one in failed:
            one.error = "; ".join(texts[one.seq][:8])
            self.pending.remove(one)
            with contextlib.suppress(OSError):
                if self._writer is not None:
                    self._writer.send({"abort": one.seq})
                if self.ranks.rank == 0:
                    self.store.discard(one.folder)
        if failed:
            raise SaveFailedError(
                "; ".join(f"save of step {one.step} failed: {one.error}" for one in failed)
            )
