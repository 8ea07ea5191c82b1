"""What is never deleted: the last whole steps, what is read, and what was just committed."""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt.saving_job import SavingJob, newest_whole_step
from ckpt.small import Small, data_files, flip, save_filled
from ckpt.test_checkpointer import _eventually
from ckpt.test_lock import Job
from ptx.ckpt import AsyncCheckpointer, _resume, verify
from ptx.ckpt._reading import reading
from ptx.ckpt._retain import retain
from ptx.ckpt._store import LocalStore


def test_damaged_steps_push_out_no_whole_one(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2, 3, 4)
    data_files(tmp_path, 3)[0].write_bytes(b"short")
    flip(tmp_path / "step-4" / "manifest.json", 200)
    with AsyncCheckpointer(tmp_path, keep=2) as checkpointer:
        save_filled(checkpointer, small, 5)
        _eventually(lambda: checkpointer.steps() == [2, 3, 4, 5])
        save_filled(checkpointer, small, 6)  # now older than the last two whole ones
        _eventually(lambda: checkpointer.steps() == [5, 6])


def test_what_a_load_found_damaged_pushes_out_no_whole_one(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2, 3)
    for step in (2, 3):
        flip(data_files(tmp_path, step)[0], 100)  # of the right size still
    with AsyncCheckpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.load(small.state) == 1
        save_filled(checkpointer, small, 4)
        time.sleep(0.1)
        assert checkpointer.steps() == [1, 2, 3, 4]
        save_filled(checkpointer, small, 2)  # anew, so it counts again
        _eventually(lambda: checkpointer.steps() == [2, 3, 4])
        assert checkpointer.load(small.state, step=2) == 2


def test_a_save_below_newer_steps_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2, 3)
    assert not caplog.records
    with AsyncCheckpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.load(small.state, step=1) == 1
        save_filled(checkpointer, small, 2, 1)  # 2 is replaced
    assert [record.getMessage() for record in caplog.records] == [
        "step 2 is saved beside newer ones, [3]: load() still takes the newest and `keep` counts them;"
        " delete them, or go on in another folder"
    ]


def test_nothing_is_deleted_if_what_was_committed_is_not_whole(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
    data_files(tmp_path, 2)[0].unlink()
    retain(LocalStore(str(tmp_path)), _job(2, keep=1))
    assert verify(tmp_path / "step-1").ok
    assert (tmp_path / "step-2").exists()


def test_a_step_that_is_read_is_spared(tmp_path: Path) -> None:
    """By another process, such as an evaluation."""
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        save_filled(checkpointer, small, 1)

        def read() -> Any:
            stack = ExitStack()
            stack.enter_context(reading(str(tmp_path / "step-1" / "manifest.json")))
            return stack.close

        job = Job(read)
        save_filled(checkpointer, small, 2, 3)
        _eventually(lambda: checkpointer.steps() == [1, 3])
        assert verify(tmp_path / "step-1").ok
        assert job.end() == 0
        save_filled(checkpointer, small, 4)
        _eventually(lambda: checkpointer.steps() == [4])


def test_a_replaced_step_that_is_read_is_spared(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        save_filled(checkpointer, small, 1)
        with reading(str(tmp_path / "step-1" / "manifest.json")):
            save_filled(checkpointer, small, 1)
            time.sleep(0.1)
            (old,) = tmp_path.glob(".replaced-1-*")
            assert (old / "manifest.json").exists()
        save_filled(checkpointer, small, 1)
        _eventually(lambda: not list(tmp_path.glob(".replaced-*")))


def test_a_load_in_progress_keeps_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=1) as saver, AsyncCheckpointer(tmp_path) as loader:
        save_filled(saver, small, 1)
        checks = _resume.verify_share

        def slow(*args: Any) -> list[str]:
            monkeypatch.setattr(_resume, "verify_share", checks)
            save_filled(saver, Small(), 2, 3)
            _eventually(lambda: saver.steps() == [1, 3])
            return checks(*args)

        monkeypatch.setattr(_resume, "verify_share", slow)
        assert loader.load(small.state) == 1
        assert small.values() == {1.0}
        save_filled(saver, small, 4)
        _eventually(lambda: saver.steps() == [4])


def test_a_load_whose_step_is_deleted_meanwhile_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On file systems without locks, and between the listing and the lock."""
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        shutil.move(tmp_path / "step-2", tmp_path.parent / "later")
        read = _resume._read

        def late(*args: Any) -> Any:
            monkeypatch.setattr(_resume, "_read", read)
            shutil.move(tmp_path.parent / "later", tmp_path / "step-2")
            shutil.rmtree(tmp_path / "step-1")
            return read(*args)

        monkeypatch.setattr(_resume, "_read", late)
        assert checkpointer.load(small.state) == 2
        assert small.values() == {2.0}
        assert "damaged" not in caplog.text


def _job(step: int, keep: int) -> dict[str, Any]:
    return {"step": step, "folder": "", "keep": keep, "keep_every": None, "damaged": []}


def check_kills(folder: Path, seed: int, count: int) -> None:
    """SIGKILLs of the job and its writer as soon as a deletion is seen, or a moment later."""
    generator, root, last = random.Random(seed), folder / "root", 0
    for i in range(count):
        opened = partial(AsyncCheckpointer, root, keep=1)
        job = SavingJob(opened, folder, last + 1, size=300, block=True)
        deadline = time.monotonic() + 60
        while not job.ready or not any(n.startswith(".trash-") for n in os.listdir(root)):
            assert time.monotonic() < deadline
        time.sleep(generator.random() * 0.004)
        job.kill(*generator.sample([job.pid, job.writer], 2))
        where = f"kill {i}, seed {seed}"
        last = newest_whole_step(partial(AsyncCheckpointer, root), last, size=300, where=where)


def test_kills_during_retention_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=0, count=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_during_retention_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=1, count=60)
