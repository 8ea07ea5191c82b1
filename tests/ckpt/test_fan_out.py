"""Saves that are staged on a disk of the node: the slot is free soon, and only the root counts."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

import ptx
from ckpt.gated import closed_gate, gated, install  # noqa: F401
from ckpt.saving_job import SavingJob, newest_whole_step
from ckpt.small import Small, data_files, save_filled, stopped_writer, writer_pid
from ckpt.test_checkpointer import _eventually
from ckpt.test_ranks import error_of
from harness import distributed
from ptx.ckpt import AsyncCheckpointer, _disk, train_state, verify
from ptx.ckpt._copy import copy_verified


def staged(stage: Path) -> list[Path]:
    return sorted(stage.glob("ptx-stage-*/*.distcp"))


def test_what_is_committed_is_what_a_save_without_a_stage_commits(tmp_path: Path) -> None:
    small, root, stage = Small(), tmp_path / "root", tmp_path / "new" / "stage"
    with AsyncCheckpointer(root, stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        assert staged(stage) == []  # each file goes once its copy is durable
        assert checkpointer.load(small.state, step=1) == 1
        assert small.values() == {1.0}
    assert os.listdir(stage) == []
    assert verify(root).steps == (1, 2)
    with AsyncCheckpointer(tmp_path / "plain") as checkpointer:
        save_filled(checkpointer, small, 2)
    (one,), (other,) = data_files(root, 2), data_files(tmp_path / "plain", 2)
    assert one.read_bytes() == other.read_bytes()


def test_a_slow_root_keeps_no_slot_but_only_so_many_saves_are_staged(
    tmp_path: Path,
    gated: str,  # noqa: F811
) -> None:
    small, stage = Small(), tmp_path / "stage"
    with AsyncCheckpointer(gated, slots=1, on_busy="skip", stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1)
        with closed_gate():
            small.fill(2)
            assert checkpointer.save(2, small.state) is not None
            # Its slot is free before any byte of it is at the root.
            small.fill(3)
            _eventually(lambda: checkpointer.save(3, small.state) is not None)
            assert len(staged(stage)) == 1
            # The next one waits in its slot for room in the stage, so now saves are skipped.
            time.sleep(0.3)
            assert checkpointer.save(4, small.state) is None
            assert checkpointer.latest() == 1
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            checkpointer.load(small.state, step=step)
            assert small.values() == {step}
    assert os.listdir(stage) == []


def test_bytes_that_changed_on_the_stage_are_not_committed(
    tmp_path: Path,
    gated: str,  # noqa: F811
) -> None:
    small, stage = Small(), tmp_path / "stage"
    with AsyncCheckpointer(gated, stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1)
        with closed_gate():
            checkpointer.save(2, small.state)
            _eventually(lambda: len(staged(stage)) == 1)
            time.sleep(0.2)  # it is being copied
            (file,) = staged(stage)
            with file.open("r+b") as bytes_:
                bytes_.seek(1000)
                bytes_.write(b"not what it was")
        with pytest.raises(RuntimeError, match=r"step-2-.*distcp, byte 0: not what was staged"):
            checkpointer.wait()
        assert checkpointer.steps() == [1]
        save_filled(checkpointer, small, 3)
        assert checkpointer.steps() == [1, 3]


def test_a_copy_has_the_bytes_of_its_checksums_or_raises(tmp_path: Path) -> None:
    data, file = os.urandom(_disk.CHUNK_BYTES + 10), tmp_path / "file"
    sums = [xxhash.xxh3_64_hexdigest(data[at : at + _disk.CHUNK_BYTES]) for at in (0, 4 * 2**20)]
    entry = {"name": "file", "bytes": len(data), "xxh3_64": sums}
    got = bytearray()

    def copy() -> None:
        got.clear()
        copy_verified(str(file), entry, got.extend, lambda: None)

    file.write_bytes(data)
    copy()
    assert got == data
    for wrong, where in ((data[:-1], _disk.CHUNK_BYTES), (b"x" + data[1:], 0)):
        file.write_bytes(wrong)
        with pytest.raises(RuntimeError, match=f"byte {where}: not what was staged"):
            copy()


def test_only_the_root_is_resumable_and_leftovers_of_the_stage_go(tmp_path: Path) -> None:
    small, root, stage = Small(), tmp_path / "root", tmp_path / "stage"
    with AsyncCheckpointer(root, stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1)
        (mine,) = os.listdir(stage)
        with stopped_writer(checkpointer):
            checkpointer.save(2, small.state)
            os.kill(writer_pid(checkpointer), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="writer process died"):
            checkpointer.wait()
        assert os.listdir(stage) == [mine]
        (stage / mine / "step-9.distcp").touch()
        assert checkpointer.latest() == 1
        save_filled(checkpointer, small, 3)
        assert staged(stage) == []
    mark = mine.rsplit("-", 3)[0]
    others = ["ptx-stage-0123456789abcdef-of-another-root", "ptx-stage", "step-7"]
    for name in [f"{mark}-00ff-rank-00005", *others]:
        (stage / name).mkdir()
    with AsyncCheckpointer(root, stage_dir=stage) as checkpointer:
        assert checkpointer.load(small.state) == 3
        assert len(os.listdir(stage)) == 4
        save_filled(checkpointer, small, 4)
    assert sorted(os.listdir(stage)) == sorted(others)


def test_a_full_stage_raises_and_the_previous_step_loads(tmp_path: Path) -> None:
    small, stage = Small(size=200), tmp_path / "stage"
    with AsyncCheckpointer(tmp_path / "root", stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1)
        pid = writer_pid(checkpointer)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
        for step in (2, 3, 4):  # more than are staged at once
            checkpointer.save(step, small.state)
            with pytest.raises(RuntimeError, match=f"save of step {step} failed: .*too large"):
                checkpointer.wait()
        assert staged(stage) == []
        assert checkpointer.load(small.state) == 1


@distributed(world_size=2)
def test_ranks_share_a_stage_or_have_their_own(tmp_path: Path) -> None:
    rank = dist.get_rank()
    mesh = ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu"))
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 7))
    fully_shard(model, mesh=mesh)
    state = train_state(model)
    for name, stage in (("shared", tmp_path / "stage"), ("own", tmp_path / f"stage-{rank}")):
        with AsyncCheckpointer(tmp_path / name, keep=2, stage_dir=stage) as checkpointer:
            for step in range(1, 5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                checkpointer.save(step, state)
                checkpointer.poll()
            checkpointer.wait()
            with torch.no_grad():
                model[0].weight.fill_(0)
            assert checkpointer.load(state) == 4
            assert model[0].weight.full_tensor().unique().tolist() == [4.0]
        dist.barrier()
        assert os.listdir(stage) == []
        assert verify(tmp_path / name).ok
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "stage" if rank else tmp_path / "stage"
    text = error_of(lambda: AsyncCheckpointer(tmp_path / "shared", stage_dir=bad))
    assert "rank 1: AsyncCheckpointer: stage_dir" in text


@distributed(world_size=2)
def test_a_copy_that_fails_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    small, rank = Small(), dist.get_rank()
    url, stage = install(tmp_path, tmp_path / f"plugin-{rank}"), tmp_path / f"stage-{rank}"
    with AsyncCheckpointer(url, keep=1, stage_dir=stage) as checkpointer:
        save_filled(checkpointer, small, 1)
        dist.barrier()
        (tmp_path / "gate").touch()
        checkpointer.save(2, small.state)
        _eventually(lambda: len(staged(stage)) == 1)
        time.sleep(0.2)
        if rank == 1:
            staged(stage)[0].write_bytes(b"something else")
        dist.barrier()
        (tmp_path / "gate").unlink(missing_ok=True)
        assert "rank 1: RuntimeError: " in (text := error_of(checkpointer.wait))
        assert "not what was staged" in text
        assert checkpointer.steps() == [1]
        save_filled(checkpointer, small, 3)
        assert checkpointer.load(small.state) == 3


def check_kills(folder: Path, seed: int, count: int) -> None:
    """SIGKILLs of the job, its writer or both, while a copy to the root is under way."""
    generator, root = random.Random(seed), folder / "root"
    opened = partial(AsyncCheckpointer, root, keep=2, stage_dir=folder / "stage")
    last = cut = i = 0
    while i < count or (not cut and i < 10 * count):
        i += 1
        job = SavingJob(opened, folder, last + 1, size=1000)
        deadline = time.monotonic() + 60
        while not job.ready or not any(_parts(root)):
            assert time.monotonic() < deadline
        time.sleep(generator.random() * 0.01)
        job.kill(*generator.choice([[job.pid], [job.pid, job.writer]]))
        _eventually(lambda job=job: not _alive(job.writer), 60.0)  # it finishes, alone
        cut += bool(_parts(root))
        where = f"kill {i}, seed {seed}"
        last = newest_whole_step(partial(AsyncCheckpointer, root), last, size=1000, where=where)
    assert cut > 0  # some were in the middle of a file
    with opened() as checkpointer:
        save_filled(checkpointer, Small(size=1000), last + 1)
    assert os.listdir(folder / "stage") == []
    assert _parts(root) == []


def _parts(root: Path) -> list[int]:
    """Sizes of the data files that are being copied."""
    found = []
    with contextlib.suppress(OSError):  # committed this moment
        found += [path.stat().st_size for path in root.glob(".saving-*/*.distcp")]
    return found


def _alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_kills_during_fan_out_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=0, count=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_during_fan_out_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=1, count=60)
