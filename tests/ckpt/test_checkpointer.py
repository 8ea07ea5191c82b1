"""One process: what a save keeps, when it is seen, and what each fault leads to."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ptx.ckpt._disk as disk
from ckpt.small import (
    Small,
    data_files,
    flip,
    listed,
    save_filled,
    stopped_writer,
    writer_pid,
)
from ptx.ckpt import AsyncCheckpointer, PerRank, train_state, verify


def test_roundtrip(tmp_path: Path) -> None:
    small, other = Small(), Small(stepped=False)
    with AsyncCheckpointer(tmp_path / "new" / "root") as checkpointer:
        assert checkpointer.load(small.state) is None
        assert checkpointer.latest() is None
        assert checkpointer.steps() == []
        handle = checkpointer.save(5, small.state, meta={"note": "x", "at": (1, None)})
        assert handle is not None
        handle.wait()
        assert handle.done
        assert handle.path == tmp_path / "new" / "root" / "step-5"
        assert checkpointer.latest() == 5
        assert checkpointer.steps() == [5]
        assert checkpointer.meta is None
        assert checkpointer.load(other.state) == 5
        assert checkpointer.meta == {"note": "x", "at": (1, None)}
    for got, want in zip(other.tensors(), small.tensors(), strict=True):
        assert torch.equal(got, want)


def test_C01_a_save_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    small, log = Small(), [1, 2]
    state = {**small.state, **train_state(small.model, log=log)}
    state["optimizer"] = small.state["optimizer"]
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 0)  # so that there is a writer to stop
        small.fill(1.0)
        with stopped_writer(checkpointer):
            checkpointer.save(1, state)
            small.fill(7.0)
            log.append(3)
            small.optimizer.param_groups[0]["lr"] = 5.0
        checkpointer.wait()
        checkpointer.load(state)
    assert small.values() == {1.0}
    assert log == [1, 2]
    assert small.optimizer.param_groups[0]["lr"] == 0.1


def test_C02_latest_names_what_is_durable_and_keep_1_always_has_one(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        save_filled(checkpointer, small, 1)
        (tmp_path / "step-3").mkdir()  # without a manifest
        with stopped_writer(checkpointer):
            small.fill(2.0)
            checkpointer.save(2, small.state)
            assert checkpointer.latest() == 1
            assert checkpointer.steps() == [1]
            assert verify(tmp_path / "step-1").ok
        checkpointer.wait()
        assert checkpointer.latest() == 2
        _eventually(lambda: checkpointer.steps() == [2])
    assert (tmp_path / "step-3").exists()


def test_C03_step_folders_are_matched_whole_and_ordered_as_numbers(tmp_path: Path) -> None:
    small = Small()
    strangers = ["step-100.backup", "foo-step-100", "step-007", "step-", "step-1e3", "Step-50"]
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 9, 10)
    for name in strangers:
        shutil.copytree(tmp_path / "step-10", tmp_path / name)
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.latest() == 10
        save_filled(checkpointer, small, 20)
        assert checkpointer.latest() == 20
        _eventually(lambda: checkpointer.steps() == [20])
        assert checkpointer.load(small.state) == 20
    assert sorted(os.listdir(tmp_path)) == sorted([*strangers, "step-20"])


def test_retention_keeps_the_newest_and_every_nth(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=2, keep_every=4) as checkpointer:
        save_filled(checkpointer, small, *range(1, 12))
        _eventually(lambda: checkpointer.steps() == [4, 8, 10, 11])


def test_retention_spares_what_was_just_committed(tmp_path: Path) -> None:
    """After going back to an old step, new ones have smaller numbers than some that are there."""
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 40, 50, 60)
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.load(small.state, step=40) == 40
        save_filled(checkpointer, small, 45)
        _eventually(lambda: checkpointer.steps() == [45, 60])


def test_retention_does_not_follow_a_failed_save(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        save_filled(checkpointer, small, 1)
        with stopped_writer(checkpointer):
            checkpointer.save(2, small.state)
            os.kill(writer_pid(checkpointer), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="writer process died"):
            checkpointer.wait()
        assert checkpointer.steps() == [1]
        assert checkpointer.load(small.state) == 1


def test_C15_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    for name, make in kinds.items():
        weights = []
        for saves in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 2)
            optimizer = make(model.parameters())
            before = torch.get_rng_state()
            if saves:
                with AsyncCheckpointer(tmp_path / name) as checkpointer:
                    state = train_state(model, optimizer)
                    checkpointer.save(0, state, block=True)
                    assert not optimizer.state
                    assert torch.equal(torch.get_rng_state(), before)
                    checkpointer.load(state)
                    assert not optimizer.state
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                weights.append(model.weight.detach().clone())
        assert all(map(torch.equal, weights[:3], weights[3:]))
    torch.manual_seed(0)
    start = torch.nn.Linear(2, 2).weight
    model = torch.nn.Linear(2, 2)
    optimizer = kinds["adamw"](model.parameters())
    with torch.no_grad():
        model.weight.copy_(start)
    with AsyncCheckpointer(tmp_path / "first") as checkpointer:
        checkpointer.save(0, train_state(model, optimizer))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.allclose(model.weight - start, torch.tensor(-0.1))


def test_a_save_while_others_are_in_flight_waits(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, slots=2) as checkpointer:
        save_filled(checkpointer, small, 0)
        pid = writer_pid(checkpointer)
        os.kill(pid, signal.SIGSTOP)
        for step in (1, 2):
            small.fill(step)
            checkpointer.save(step, small.state)
        timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        timer.start()
        start = time.monotonic()
        small.fill(3)
        checkpointer.save(3, small.state)
        assert time.monotonic() - start > 0.3
        timer.join()
        checkpointer.wait()
        assert checkpointer.steps() == [0, 1, 2, 3]
        for step in range(4):
            checkpointer.load(small.state, step=step)
            assert small.values() == {step}


def test_a_save_while_others_are_in_flight_is_skipped_if_asked(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, slots=1, on_busy="skip") as checkpointer:
        save_filled(checkpointer, small, 0)
        with stopped_writer(checkpointer):
            assert checkpointer.save(1, small.state) is not None
            assert checkpointer.save(2, small.state) is None
        checkpointer.wait()
        assert checkpointer.steps() == [0, 1]
        assert checkpointer.save(3, small.state) is not None


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 7)
        small.fill(8.0)
        checkpointer.save(7, small.state, block=True)
        checkpointer.load(small.state)
        assert small.values() == {8.0}
    assert os.listdir(tmp_path) == ["step-7"]


def test_a_crash_between_the_renames_of_a_replaced_step_loses_nothing(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 6, 7)
        (tmp_path / "step-7").rename(tmp_path / ".replaced-7-0123456789ab")
        assert checkpointer.latest() == 7
        assert checkpointer.load(small.state) == 7
        save_filled(checkpointer, small, 7)
        _eventually(lambda: listed(tmp_path) == ["step-6", "step-7"])


def test_a_strange_folder_of_the_same_name_is_moved_aside_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "notes.txt").write_text("mine")
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, Small(), 7)
    (aside,) = tmp_path.glob("step-7.before-*")
    assert (aside / "notes.txt").read_text() == "mine"
    assert verify(tmp_path).steps == (7,)


def test_leftovers_of_earlier_processes_are_removed_at_the_first_save(tmp_path: Path) -> None:
    small = Small()
    kept = [".saving-x-1", "step-1.saving-2-ab", ".trash-", "notes.txt"]
    for name in [".saving-3-00ff", ".trash-00ff", ".replaced-2-00ff", *kept]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-2").mkdir()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(RuntimeError, match=r"manifest\.json"):
            checkpointer.load(small.state)  # changes nothing
        assert (tmp_path / ".saving-3-00ff").exists()
        save_filled(checkpointer, small, 4)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "step-2", "step-4"])


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_flipped_bit_is_found_named_and_passed_over(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        (file,) = data_files(tmp_path, 2)
        offset = {"first": 0, "middle": file.stat().st_size // 2, "last": -1}[where]
        flip(file, offset)
        with caplog.at_level(logging.WARNING, "ptx.ckpt"):
            assert checkpointer.load(small.state) == 1
        assert small.values() == {1.0}
        assert checkpointer.meta == {"step": 1}
        assert f"{file}, byte 0: the checksum" in caplog.text
        with pytest.raises(RuntimeError, match="byte 0: the checksum"):
            checkpointer.load(small.state, step=2)
    report = verify(tmp_path)
    assert [str(d.file) for d in report.damage] == [str(file)]
    assert not report.ok


def test_the_offset_of_damage_is_that_of_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(size=1200)  # 17 MB of state
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
    (file,) = data_files(tmp_path, 1)
    flip(file, 9 * 2**20 + 5)
    (damage,) = verify(tmp_path).damage
    assert (damage.step, damage.offset) == (1, 8 * 2**20)
    assert "step 1" in str(verify(tmp_path))


@pytest.mark.parametrize("name", ["data", "manifest.json", ".metadata"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "longer", "empty"])
def test_a_missing_or_cut_file_under_a_committed_step_is_passed_over(
    tmp_path: Path, name: str, fault: str
) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        file = data_files(tmp_path, 2)[0] if name == "data" else tmp_path / "step-2" / name
        whole = file.read_bytes()
        if fault == "missing":
            file.unlink()
        else:
            cut = {"truncated": whole[:-7], "longer": whole + b"\n", "empty": b""}[fault]
            file.write_bytes(cut)
        assert checkpointer.latest() == 1
        assert checkpointer.load(small.state) == 1
        assert small.values() == {1.0}
        assert not verify(tmp_path / "step-2").ok


def test_a_corrupt_manifest_is_damage_not_a_fresh_start(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        manifest = tmp_path / "step-1" / "manifest.json"
        whole = manifest.read_bytes()
        for offset in (0, 3, len(whole) // 2, len(whole) - 1):
            flip(manifest, offset)
            small.fill(9.0)
            with pytest.raises(RuntimeError, match="none of 1 steps verifies"):
                checkpointer.load(small.state)
            assert small.values() == {9.0}
            manifest.write_bytes(whole)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        manifest = tmp_path / "step-1" / "manifest.json"
        body = manifest.read_bytes().partition(b"\n")[2]
        manifest.write_bytes(disk.seal(body.replace(b'"format": 1', b'"format": 2')))
        with pytest.raises(ValueError, match="format 2, this version of ptx reads up to 1"):
            checkpointer.load(small.state)


def test_an_explicit_step_has_no_substitute(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        with pytest.raises(ValueError, match=r"no step 3 in .*; there are \[1, 2\]"):
            checkpointer.load(small.state, step=3)
        assert checkpointer.load(small.state, step=1) == 1


def test_meta_that_cannot_be_serialised_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"'meta\.a' is a builtins\.object"):
            checkpointer.save(1, small.state, meta={"a": object()})
        with pytest.raises(ValueError, match="meta has tensors"):
            checkpointer.save(1, small.state, meta={"a": torch.ones(1)})
        assert os.listdir(tmp_path) == []
        save_filled(checkpointer, small, 1)


def test_a_read_only_directory_is_refused_at_the_save() -> None:
    small = Small()
    with tempfile.TemporaryDirectory() as root:  # pytest's own is closed to others
        with AsyncCheckpointer(root) as checkpointer:
            save_filled(checkpointer, small, 1)
        Path(root).chmod(0o555)
        with _as_nobody(), AsyncCheckpointer(root) as checkpointer:
            assert checkpointer.load(small.state) == 1
            with pytest.raises(RuntimeError, match="Permission denied"):
                checkpointer.save(2, small.state)
        Path(root).chmod(0o755)


def test_a_full_disk_raises_leaves_no_files_and_the_previous_step_loads(tmp_path: Path) -> None:
    small = Small(size=200)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        resource.prlimit(writer_pid(checkpointer), resource.RLIMIT_FSIZE, (50_000, 50_000))
        small.fill(2.0)
        checkpointer.save(2, small.state)
        with pytest.raises(
            RuntimeError, match=r"save of step 2 failed: rank 0: OSError.*too large"
        ):
            checkpointer.wait()
        _eventually(lambda: listed(tmp_path) == ["step-1"])
        assert checkpointer.load(small.state) == 1
        assert small.values() == {1.0}


def test_a_vanished_folder_raises(tmp_path: Path) -> None:
    small = Small()
    root = tmp_path / "root"
    with AsyncCheckpointer(root) as checkpointer:
        save_filled(checkpointer, small, 1)
        with stopped_writer(checkpointer):
            checkpointer.save(2, small.state)
            root.rename(tmp_path / "elsewhere")
        with pytest.raises(RuntimeError, match="the folder is gone"):
            checkpointer.wait()
        with pytest.raises(RuntimeError, match="No such file"):
            checkpointer.save(3, small.state)
        (tmp_path / "elsewhere").rename(root)
        save_filled(checkpointer, small, 4)
        assert checkpointer.steps() == [1, 4]


def test_a_dead_writer_is_noticed_at_the_next_poll_and_restarted(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        with stopped_writer(checkpointer):
            handle = checkpointer.save(2, small.state)
            os.kill(writer_pid(checkpointer), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"step 2 failed.*died .killed by signal 9"):
            _poll_until_it_raises(checkpointer)
        assert not handle.done
        with pytest.raises(RuntimeError, match="step 2 failed"):
            handle.wait()
        checkpointer.poll()  # surfaced once
        save_filled(checkpointer, small, 3)
        assert checkpointer.steps() == [1, 3]
        assert listed(tmp_path) == ["step-1", "step-3"]


def test_a_writer_that_dies_idle_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        os.kill(writer_pid(checkpointer), signal.SIGKILL)
        _eventually(lambda: (checkpointer.poll(), "idle writer" in caplog.text)[1])
        save_filled(checkpointer, small, 2)
        assert checkpointer.steps() == [1, 2]


def test_a_dead_writer_does_not_undo_what_it_committed(tmp_path: Path) -> None:
    """It may die between the rename and its report."""
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, small.state)
        _eventually(lambda: checkpointer.steps() == [1])
        writer = checkpointer._flight._writer
        writer._rest, writer.reports = b"", lambda seconds=0.0: _dead(writer)
        checkpointer.wait()
        assert handle.done


def _dead(writer: Any) -> list[Any]:
    os.kill(writer.pid, signal.SIGKILL)
    writer.ended = True
    return []


EXIT = """
    import os, sys, torch
    sys.path[:0] = {path!r}
    import torch.distributed as dist
    from ckpt.small import Small
    from ptx.ckpt import AsyncCheckpointer
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    small = Small(size=1000)
    checkpointer = AsyncCheckpointer({root!r})
    small.fill(3.0)
    checkpointer.save(3, small.state)
    dist.destroy_process_group()
"""


def test_exit_right_after_a_save_finishes_it(tmp_path: Path) -> None:
    code = textwrap.dedent(EXIT).format(path=sys.path, root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["step-3"]
    assert verify(tmp_path).ok


def _exit_in_a_fork(root: Path, errors: Path, end: Any) -> int:
    """The exit code of a process that saves and then comes to its end; without the imports."""
    if (child := os.fork()) == 0:
        sys.stderr = errors.open("w")
        checkpointer = AsyncCheckpointer(root)
        checkpointer.save(3, Small(size=1000).state)
        end(checkpointer)
        atexit._run_exitfuncs()  # what the interpreter does
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_exit_with_a_save_that_cannot_finish_is_an_error(tmp_path: Path) -> None:
    root, errors = tmp_path / "root", tmp_path / "errors"
    assert _exit_in_a_fork(root, errors, lambda checkpointer: None) == 0
    assert verify(root).steps == (3,)
    code = _exit_in_a_fork(root, errors, lambda c: os.kill(writer_pid(c), signal.SIGKILL))
    assert code == 1
    assert "unfinished at exit: step 3: the writer process died" in errors.read_text()
    assert verify(root).steps == (3,)


def test_an_exception_in_the_block_still_finishes_the_save(tmp_path: Path) -> None:
    def leave() -> None:
        with AsyncCheckpointer(tmp_path) as checkpointer:
            checkpointer.save(1, Small().state)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert verify(tmp_path).steps == (1,)


def test_closed_means_closed(tmp_path: Path) -> None:
    small = Small()
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(1, small.state),
        lambda: checkpointer.load(small.state),
        checkpointer.poll,
        checkpointer.wait,
    ):
        with pytest.raises(ValueError, match="closed; make a new one"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be an integer of at least 1, got 0"),
        ({"keep": 0}, "keep must be"),
        ({"keep": True}, "keep must be"),
        ({"keep_every": 5}, "keep_every exempts"),
        ({"on_busy": "drop"}, "on_busy must be 'wait' or 'skip', got 'drop'"),
        ({"stage_dir": "s3://x/y"}, "stage_dir must be a folder, got the URL 's3://x/y'"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncCheckpointer(tmp_path, **options)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 2**63])
def test_steps_are_integers_from_0_on(tmp_path: Path, step: Any) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="save: step must be"):
            checkpointer.save(step, Small().state)
        for one in (np.int64(4), torch.tensor(4)):
            handle = checkpointer.save(one, {})
            assert handle is not None
            assert handle.step == 4


def test_a_fork_of_the_trainer_is_not_in_the_way(tmp_path: Path) -> None:
    """A loader's worker holds the pipes and buffers open, and may be dropped with all of them."""
    small = Small()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        checkpointer.save(2, small.state)
        start = time.monotonic()
    assert time.monotonic() - start < 9  # WriterProcess.stop() would have to kill it after 10
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert verify(tmp_path).steps == (1, 2)


def test_a_checkpointer_that_is_dropped_finishes(tmp_path: Path) -> None:
    checkpointer = AsyncCheckpointer(tmp_path)
    checkpointer.save(1, Small().state)
    del checkpointer
    gc.collect()
    assert verify(tmp_path).steps == (1,)


def test_memory_is_flat_over_many_saves(tmp_path: Path) -> None:
    small = Small(size=700)  # 6 MB of state
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        save_filled(checkpointer, small, *range(3))
        before = [slot.size for slot in checkpointer._flight.slots]
        maps = _mapped()
        save_filled(checkpointer, small, *range(3, 53))
        assert [slot.size for slot in checkpointer._flight.slots] == before
        assert _mapped() == maps
        assert len(before) == 2
        state = sum(t.nbytes for t in small.tensors())
        assert all(state <= size < state + 3 * 2**20 for size in before)


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("ptx-slot")


def test_shapes_may_change_between_saves(tmp_path: Path) -> None:
    small = Small(stepped=False)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, small.state)
        small.step()
        checkpointer.save(1, small.state)  # now with moments
        grown = Small(size=300)
        checkpointer.save(2, grown.state)
        checkpointer.save(3, small.state)
        checkpointer.wait()
        small.fill(0.0)
        assert checkpointer.load(small.state, step=0) == 0
        assert not small.optimizer.state
        assert checkpointer.load(small.state, step=1) == 1
        want = small.tensors()
        assert checkpointer.load(small.state, step=3) == 3
        assert all(map(torch.equal, want, small.tensors()))
    assert verify(tmp_path).ok


def test_an_empty_state_and_a_long_meta(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {}, block=True)
        assert checkpointer.load({}) == 0
        long = {"text": "x" * 3_000_000}
        checkpointer.save(1, {}, meta=long, block=True)
        assert checkpointer.load({}) == 1
        assert checkpointer.meta == long


def test_state_that_differs_by_rank_is_loaded_by_its_rank(tmp_path: Path) -> None:
    mine = PerRank([1, {"x": torch.arange(3)}])
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"mine": mine}, block=True)
        other = PerRank([])
        checkpointer.load({"mine": other})
        got = other.value.value
        assert got[0] == 1
        assert got[1]["x"].tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="'mine' is its own on each rank"):
            checkpointer.load({"mine": other.value})


def _poll_until_it_raises(checkpointer: AsyncCheckpointer) -> None:
    for _ in range(1000):
        checkpointer.poll()
        time.sleep(0.01)


def _eventually(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _as_nobody:
    """Root may write anywhere, so be someone else for a while."""

    def __enter__(self) -> None:
        self.uid = os.geteuid()
        if self.uid == 0:
            os.seteuid(65534)

    def __exit__(self, *_: Any) -> None:
        os.seteuid(self.uid)
