"""Roots that are URLs: a step is there once its manifest is, and the older one stays until then."""

from __future__ import annotations

import builtins
import logging
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ptx
from ckpt.gated import closed_gate, gated  # noqa: F401
from ckpt.saving_job import SavingJob, newest_whole_step
from ckpt.small import Small, flip, save_filled, writer_pid
from ckpt.test_checkpointer import _eventually
from ckpt.test_lock import foreign
from ckpt.test_ranks import error_of
from harness import distributed, run
from ptx.ckpt import AsyncCheckpointer, _lock, train_state, verify
from ptx.ckpt.__main__ import main
from ptx.ckpt._remote import RemoteStore


def open_at(folder: Path, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(f"file://{folder}/root", stage_dir=folder / "stage", **options)


def attempts(folder: Path, step: int) -> list[Path]:
    return sorted((folder / "root").glob(f"step-{step}-*"))


def test_roundtrip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, other = Small(), Small(stepped=False)
    with open_at(tmp_path) as checkpointer:
        assert checkpointer.load(small.state) is None
        handle = checkpointer.save(5, small.state, meta={"note": "x"})
        assert handle is not None
        handle.wait()
        assert handle.path == f"{checkpointer.root}/{attempts(tmp_path, 5)[0].name}"
        assert checkpointer.latest() == 5
        assert checkpointer.steps() == [5]
        assert checkpointer.load(other.state) == 5
        assert checkpointer.meta == {"note": "x"}
    for got, want in zip(other.tensors(), small.tensors(), strict=True):
        assert torch.equal(got, want)
    assert os.listdir(tmp_path / "stage") == []
    (attempt,) = attempts(tmp_path, 5)
    assert os.listdir(tmp_path / "root") == [attempt.name]  # no lock
    assert sorted(os.listdir(attempt)) == [".metadata", "manifest.json", "rank-00000.distcp"]
    for url in (f"file://{tmp_path}/root", f"file://{attempt}"):
        assert verify(url).ok
        assert [main([command, url]) for command in ("verify", "list", "show")] == [0, 0, 0]
    assert "saved by 1 ranks" in capsys.readouterr().out


def test_a_remote_root_needs_a_stage_and_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is a URL, which needs stage_dir"):
        AsyncCheckpointer("s3://bucket/run")
    with pytest.raises(ValueError, match=r"'nosuch://x/y': .*nosuch"):
        AsyncCheckpointer("nosuch://x/y", stage_dir=tmp_path)
    import_module = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ImportError(name)
        return import_module(name, *rest)

    monkeypatch.setattr("ptx.ckpt._remote.import_module", without)
    with pytest.raises(ValueError, match="needs fsspec; pip install fsspec"):
        open_at(tmp_path)


def test_a_step_saved_again_replaces_the_old_one_by_its_manifest(
    tmp_path: Path,
    gated: str,  # noqa: F811
) -> None:
    small = Small()
    with AsyncCheckpointer(gated, stage_dir=tmp_path / "stage") as checkpointer:
        save_filled(checkpointer, small, 7)
        with closed_gate():
            small.fill(8)
            checkpointer.save(7, small.state)
            _eventually(lambda: len(attempts(tmp_path, 7)) == 2)
            time.sleep(0.2)
            checkpointer.load(small.state)
            assert small.values() == {7.0}
        checkpointer.wait()
        checkpointer.load(small.state)
        assert small.values() == {8.0}
        _eventually(lambda: len(attempts(tmp_path, 7)) == 1)


def test_a_killed_upload_is_no_step_and_goes_at_the_next_first_save(
    tmp_path: Path,
    gated: str,  # noqa: F811
) -> None:
    small = Small()
    with AsyncCheckpointer(gated, stage_dir=tmp_path / "stage") as checkpointer:
        save_filled(checkpointer, small, 1)
        with closed_gate():
            checkpointer.save(2, small.state)
            _eventually(lambda: len(attempts(tmp_path, 2)) == 1)
            os.kill(writer_pid(checkpointer), signal.SIGKILL)
            with pytest.raises(RuntimeError, match="writer process died"):
                checkpointer.wait()
    (tmp_path / "root" / "step-3-00000000000000ff").mkdir()
    (tmp_path / "root" / "step-3-00000000000000ff" / "rank-00000.distcp").touch()
    (tmp_path / "root" / "step-4-other").mkdir()
    with AsyncCheckpointer(gated, stage_dir=tmp_path / "stage") as checkpointer:
        assert checkpointer.steps() == [1]
        assert checkpointer.load(small.state) == 1
        save_filled(checkpointer, small, 5)
    names = sorted(name.rpartition("-")[0] for name in os.listdir(tmp_path / "root"))
    assert names == ["step-1", "step-4", "step-5"]


@pytest.mark.parametrize("fault", ["flip", "short", "missing", "manifest"])
def test_damage_is_found_and_named_by_its_url(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with open_at(tmp_path) as checkpointer:
        save_filled(checkpointer, small, 1, 2)
        (attempt,) = attempts(tmp_path, 2)
        file = attempt / "rank-00000.distcp"
        if fault == "flip":
            flip(file, 500)
        elif fault == "short":
            file.write_bytes(file.read_bytes()[:-1])
        elif fault == "missing":
            file.unlink()
        else:
            file = attempt / "manifest.json"
            flip(file, 50)
        with caplog.at_level(logging.WARNING, "ptx.ckpt"):
            assert checkpointer.load(small.state) == 1
        assert small.values() == {1.0}
        assert f"file://{file}, byte" in caplog.text
    assert not verify(f"file://{tmp_path}/root").ok


def test_retention(tmp_path: Path) -> None:
    small = Small()
    with open_at(tmp_path, keep=2, keep_every=4) as checkpointer:
        save_filled(checkpointer, small, *range(1, 8))
        _eventually(lambda: checkpointer.steps() == [4, 6, 7])
    (tmp_path / "root" / "step-7.backup").mkdir()
    with open_at(tmp_path, keep=1) as checkpointer:
        assert checkpointer.latest() == 7
        save_filled(checkpointer, small, 9)
        _eventually(lambda: checkpointer.steps() == [9])
    assert (tmp_path / "root" / "step-7.backup").exists()


def test_two_jobs_on_one_url(tmp_path: Path) -> None:
    small, root = Small(), tmp_path / "root"
    with open_at(tmp_path) as checkpointer:
        lock = foreign(root, beat=time.time())
        with pytest.raises(
            RuntimeError, match=r"process 7 on there .*last sign of life is [0-9] s"
        ):
            checkpointer.save(1, small.state)
        foreign(root, beat=time.time() - _lock.STALE_SECONDS - 1)
        save_filled(checkpointer, small, 1)
        with open_at(tmp_path) as other, pytest.raises(RuntimeError, match="is this process"):
            other.save(2, small.state)
        old = lock.read_bytes()
        checkpointer._flight.lock._next_beat = 0.0
        checkpointer._flight.lock.beat()
        assert lock.read_bytes() != old
    assert not lock.exists()


@distributed(world_size=2)
def test_ranks_upload_their_own(tmp_path: Path) -> None:
    model, state = _sharded(5.0)
    with AsyncCheckpointer(
        f"file://{tmp_path}/root", stage_dir=tmp_path / f"stage-{dist.get_rank()}"
    ) as checkpointer:
        text = error_of(lambda: checkpointer.save(dist.get_rank(), state))
        assert "the ranks save different steps" in text
        checkpointer.save(5, state, block=True)
        with torch.no_grad():
            model.weight.fill_(0.0)
        assert checkpointer.load(state) == 5
        assert model.weight.full_tensor().unique().tolist() == [5.0]
        dist.barrier()
        if dist.get_rank() == 0:
            (file,) = (tmp_path / "root").glob("step-5-*/rank-00001.distcp")
            file.unlink()
        dist.barrier()
        assert "rank-00001.distcp, byte 0: it isn't there" in error_of(
            lambda: checkpointer.load(state)
        )


def _sharded(value: float) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Linear(64, 1501)  # uneven rows
    fully_shard(model, mesh=ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, train_state(model)


def _save(folder: str) -> None:
    model, state = _sharded(0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(torch.arange(local.numel()).view(local.shape) + dist.get_rank())
    with AsyncCheckpointer(f"file://{folder}/root", stage_dir=f"{folder}/stage") as checkpointer:
        checkpointer.save(3, state)


def test_another_number_of_ranks_fetches_what_it_needs(tmp_path: Path) -> None:
    run(_save, 2, str(tmp_path))
    model = nn.Linear(64, 1501)
    with open_at(tmp_path) as checkpointer:
        assert checkpointer.load({"model": model}) == 3
    halves = model.weight.detach().split([751, 750])
    for rank, half in enumerate(halves):
        want = torch.arange(half.numel(), dtype=torch.float32).view(half.shape) + rank
        assert torch.equal(half, want)


def check_kills(folder: Path, seed: int, count: int) -> None:
    """SIGKILLs of a job and its writer at any moment of an upload, a commit or a deletion."""
    generator, last = random.Random(seed), 0
    for i in range(count):
        job = SavingJob(partial(open_at, folder, keep=1), folder, last + 1, size=300)
        _eventually(lambda job=job: job.ready, 60.0)
        time.sleep(generator.random() * 0.3)
        job.kill(job.pid, job.writer)
        where = f"kill {i}, seed {seed}"
        last = newest_whole_step(partial(open_at, folder), last, size=300, where=where)


def test_kills_during_uploads_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=0, count=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_during_uploads_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=1, count=60)


def test_a_chained_url(tmp_path: Path) -> None:
    small = Small()
    (tmp_path / "root").mkdir()
    url = f"dir://x::file://{tmp_path}/root"
    with AsyncCheckpointer(url, stage_dir=tmp_path / "stage") as checkpointer:
        save_filled(checkpointer, small, 1)
        assert checkpointer.load(small.state) == 1
    shutil.rmtree(tmp_path / "root")


def test_a_cut_off_manifest_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an upload isn't whole or nothing, as over SFTP."""
    store = RemoteStore(f"file://{tmp_path}")
    folder = store.attempt(3, 1)
    store.make(folder)

    def half(path: str, data: bytes) -> None:
        Path(path).write_bytes(data[:5])
        raise OSError("connection lost")

    with monkeypatch.context() as broken:
        broken.setattr(store.fs, "pipe_file", half)
        with pytest.raises(OSError, match="connection lost"):
            store.commit(folder, 3, b"manifest", [], lambda: None)
    assert store.folders() == []
    assert store.leftovers() == [folder]
    store.commit(folder, 3, b"manifest", [], lambda: None)
    assert store.folders() == [(3, store.path(folder))]
