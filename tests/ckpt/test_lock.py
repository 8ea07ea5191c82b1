"""Two jobs on one root: the second is told who holds it, and who is gone is taken over."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.small import Small, save_filled, stopped_writer, writer_pid
from ckpt.test_ranks import error_of
from harness import distributed
from ptx.ckpt import AsyncCheckpointer, _lock, verify
from ptx.ckpt._lock import LocalLockFile, RootLock, still_held

LOCK = ".lock"


class Job:
    """A fork of this process that does something, says so, and waits for ``end`` or ``kill``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        ready, self._ready = os.pipe()
        wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            os.close(ready)
            os.close(self._go)  # so that the end of its parent is its end, too
            try:
                end = work()
                os.write(self._ready, b"x")
                os.read(wait, 1)
                if end is not None:
                    end()
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(self._ready)
        os.close(wait)
        assert os.read(ready, 1) == b"x"
        os.close(ready)

    def end(self) -> int:
        if self._go >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._go, b"x")
            os.close(self._go)
            self._go = -1
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def saving_job(root: Path) -> Job:
    def work() -> Callable[[], None]:
        checkpointer = AsyncCheckpointer(root)
        save_filled(checkpointer, Small(), 1)
        return checkpointer.close

    return Job(work)


def foreign(root: Path, **other: Any) -> Path:
    """The lock of a job elsewhere."""
    holder = {"token": "x", "host": "there", "machine": "there", "pid": 7, "started": 8, "since": 0}
    (root / LOCK).write_text(json.dumps({**holder, **other}))
    return root / LOCK


def test_two_jobs_on_one_directory_the_second_refuses_and_names_the_holder(tmp_path: Path) -> None:
    job, small = saving_job(tmp_path), Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.load(small.state) == 1  # readers are welcome
        holder = f"in use by process {job.pid} on {socket.gethostname()} since 20.*, which is alive"
        with pytest.raises(RuntimeError, match=holder):
            checkpointer.save(2, small.state)
        assert job.end() == 0
        save_filled(checkpointer, small, 2)
    assert os.listdir(tmp_path).count(LOCK) == 0
    assert verify(tmp_path).steps == (1, 2)


def test_a_killed_holder_is_taken_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, small = saving_job(tmp_path), Small()
    os.kill(job.pid, signal.SIGKILL)
    time.sleep(0.05)  # a zombie until it is waited for
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with caplog.at_level(logging.WARNING, "ptx.ckpt"):
            save_filled(checkpointer, small, 2)
        assert f"taken over from process {job.pid} on " in caplog.text
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert job.end() == -signal.SIGKILL


def test_the_lock_is_taken_at_the_first_save_and_given_back(tmp_path: Path) -> None:
    small, lock = Small(), tmp_path / LOCK
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.load(small.state)
    checkpointer.poll()
    assert not lock.exists()
    save_filled(checkpointer, small, 1)
    assert lock.exists()
    with (
        AsyncCheckpointer(tmp_path) as other,
        pytest.raises(RuntimeError, match="which is this process"),
    ):
        other.save(2, small.state)
    assert lock.exists()  # not the other's to remove
    checkpointer.close()
    assert not lock.exists()

    dropped = AsyncCheckpointer(tmp_path)
    dropped.save(2, small.state)
    del dropped
    gc.collect()
    assert not lock.exists()

    def leave() -> None:
        with AsyncCheckpointer(tmp_path) as one:
            one.save(3, small.state)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert not lock.exists()
    assert verify(tmp_path).steps == (1, 2, 3)


def test_a_reused_process_id_is_noticed(tmp_path: Path) -> None:
    me = _lock._myself()
    foreign(tmp_path, **{**me, "pid": os.getppid(), "started": 1})
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, Small(), 1)


@pytest.mark.parametrize("content", ["another host", "unreadable"])
def test_elsewhere_the_last_sign_of_life_decides(tmp_path: Path, content: str) -> None:
    small, lock = Small(), foreign(tmp_path)
    if content == "unreadable":
        lock.write_text("{")
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(RuntimeError, match=r"whose last sign of life is [01] seconds old"):
            checkpointer.save(1, small.state)
        recent = time.time() - _lock.STALE_SECONDS + 30
        os.utime(lock, (recent, recent))
        with pytest.raises(RuntimeError, match="in use by"):
            checkpointer.save(1, small.state)
        old = time.time() - _lock.STALE_SECONDS - 1
        os.utime(lock, (old, old))
        save_filled(checkpointer, small, 1)
    assert sorted(os.listdir(tmp_path)) == ["step-1"]


@distributed(world_size=2)
def test_two_jobs_on_one_directory_all_ranks_of_the_second_refuse(tmp_path: Path) -> None:
    small = Small()
    if dist.get_rank() == 0:
        foreign(tmp_path)
    dist.barrier()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        text = error_of(lambda: checkpointer.save(1, small.state))
        assert "in use by process 7 on there since 1970-01-01" in text
        assert "wait for that job's end or choose another folder" in text
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / LOCK).unlink()
        dist.barrier()
        save_filled(checkpointer, small, 1)


def test_who_was_taken_over_neither_saves_nor_commits(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        with stopped_writer(checkpointer):
            checkpointer.save(2, small.state)
            foreign(tmp_path)
        with pytest.raises(RuntimeError, match="another job has taken the root over"):
            checkpointer.wait()
        with pytest.raises(RuntimeError, match=r"process 7 on there .* has taken .* over"):
            checkpointer.save(3, small.state)
        assert checkpointer.steps() == [1]
    assert (tmp_path / LOCK).exists()


def test_a_lock_removed_by_hand_is_taken_again(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        (tmp_path / LOCK).unlink()
        save_filled(checkpointer, small, 2)
        assert (tmp_path / LOCK).exists()


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lock, "BEAT_SECONDS", 0.01)
    file, lock = LocalLockFile(str(tmp_path)), RootLock(LocalLockFile(str(tmp_path)), "here")
    lock.hold()

    def beats() -> bool:
        os.utime(tmp_path / LOCK, (1, 1))
        time.sleep(0.2)
        return (tmp_path / LOCK).stat().st_mtime > 1

    assert not beats()
    lock.beat()  # what a poll calls
    assert (tmp_path / LOCK).stat().st_mtime > 1
    if (pid := os.fork()) == 0:
        _lock.keep_beating(file, lock.token)  # as in rank 0's writer
    assert beats()
    foreign(tmp_path)
    time.sleep(0.1)
    assert not beats()  # another's
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_polls_give_signs_of_life_while_there_is_no_writer(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, Small(), 1)
        os.kill(writer_pid(checkpointer), signal.SIGKILL)
        while checkpointer._flight._writer is not None:
            checkpointer.poll()
        os.utime(tmp_path / LOCK, (1, 1))
        checkpointer._flight.lock._next_beat = 0.0
        checkpointer.poll()
        assert (tmp_path / LOCK).stat().st_mtime > 1


def test_one_of_many_takes_over(tmp_path: Path) -> None:
    os.utime(foreign(tmp_path), (1, 1))
    gate, winners = tmp_path / "gate", tmp_path / "winners"
    winners.mkdir()

    def work() -> None:
        if os.fork():  # so that all are started before one waits
            return
        while not gate.exists():
            pass
        lock = RootLock(LocalLockFile(str(tmp_path)), "here")
        try:
            lock.hold()
        except RuntimeError:
            os._exit(0)
        (winners / str(os.getpid())).touch()
        time.sleep(1.0)
        os._exit(0)

    jobs = [Job(work) for _ in range(6)]
    gate.touch()
    time.sleep(0.8)
    assert len(os.listdir(winners)) == 1
    assert [job.end() for job in jobs] == [0] * 6


class _Rewritten(LocalLockFile):
    """Each sign of life writes it anew, and half the readers come in between."""

    reads = 0

    def read(self) -> bytes | None:
        self.reads += 1
        data = super().read()
        return data and (b"" if self.reads % 2 else data)


def test_a_lock_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    file = _Rewritten(str(tmp_path))
    lock = RootLock(file, "here")
    for _ in range(3):
        lock.hold()
        assert still_held(file, lock.token)
    assert not still_held(file, "another")


@pytest.mark.parametrize("content", ["", "[1]", '{"token": "x"}'])
def test_a_damaged_lock_keeps_nobody_out_for_ever(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(RuntimeError, match="a job without a readable name"):
        RootLock(LocalLockFile(str(tmp_path)), "here").hold()
    os.utime(tmp_path / LOCK, (0, 0))
    RootLock(LocalLockFile(str(tmp_path)), "here").hold()
