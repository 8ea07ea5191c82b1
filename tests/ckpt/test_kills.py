"""SIGKILLs from outside, at random moments: what loads afterwards is the newest commit, whole."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import harness
import ptx
from ckpt.conftest import writers_on
from ptx.ckpt import AsyncCheckpointer, _writer_process, train_state, verify

WORLD = 2
ORPHAN_SECONDS = 2.0  # a minute in earnest
PATIENCE = 30.0  # for survivors and orphans to go away, on a machine that has other things to do


def _model(sharded: bool) -> tuple[nn.Module, dict[str, Any], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500))
    if sharded:
        fully_shard(model, mesh=ptx.fsdp_mesh(ptx.build_mesh(device_type="cpu")))
    optimizer = torch.optim.AdamW(model.parameters())
    count = [0]
    return model, train_state(model, optimizer, count=count), count


def train_for_ever(root: str, stage: str | None) -> None:
    """Resumes, then saves step after step; every tensor of step n is n."""
    faulthandler.register(signal.SIGUSR1)
    _writer_process.ORPHAN_SECONDS = ORPHAN_SECONDS
    model, state, count = _model(sharded=True)
    model(torch.ones(1, 500)).sum().backward()
    optimizer = state["optimizer"].optimizers[0]
    optimizer.step()
    checkpointer = AsyncCheckpointer(root, keep=1 if stage else 3, stage_dir=stage)
    step = checkpointer.load(state) or 0
    while True:
        step += 1
        count[0] = step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                for value in optimizer.state[parameter].values():
                    value.fill_(step)
        try:
            checkpointer.save(step, state)
            checkpointer.poll()
        except RuntimeError:
            # A writer was killed: training goes on. If a rank was, this raises, too.
            dist.barrier()


def start_ranks(root: str, stage: str | None, folder: str) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    payload = pickle.dumps(((root, stage), {}))
    target = (train_for_ever.__module__, train_for_ever.__qualname__, payload)
    ranks = []
    for rank in range(WORLD):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=harness._rank_main,
            args=(rank, WORLD, folder, target, 100.0, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        ranks.append((process, mine))
    return ranks


def steps_in(root: Path) -> list[int]:
    names = [path.name for path in root.iterdir()] if root.exists() else []
    return sorted(int(name[5:]) for name in names if name.startswith("step-"))


def _wait(condition: Any) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def _stacks(ranks: list[Any], folder: str) -> str:
    for process, _ in ranks:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(path.read_text() for path in Path(folder).glob("output-*"))


def kill_once(root: Path, stage: str | None, generator: random.Random) -> str:
    """One incarnation of the run, and its end."""
    before = max(steps_in(root), default=0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_ranks(str(root), stage, folder)
        try:
            if started := generator.random() < 0.8:
                assert _wait(lambda: max(steps_in(root), default=0) > before), _stacks(
                    ranks, folder
                )
            time.sleep(generator.random() * 0.3)
            whom = generator.choice(
                ["rank 0", "rank 1", "all", "writer", "writers", "rank and writer"]
            )
            writers = writers_on(str(root))
            generator.shuffle(writers)
            victims = {
                "rank 0": [ranks[0][0].pid],
                "rank 1": [ranks[1][0].pid],
                "all": [process.pid for process, _ in ranks],
                "writer": writers[:1],
                "writers": writers,
                "rank and writer": [ranks[generator.randrange(2)][0].pid, *writers[:1]],
            }[whom]
            for pid in victims:
                _kill(pid)
            if "rank" in whom and started:  # before that torch waits for its peer to connect
                # Its peer raises by itself, at once: no group timeout is waited for.
                if not _wait(lambda: all(pipe.poll() for _, pipe in ranks)):
                    pytest.fail(f"a survivor hangs after {whom}: {_stacks(ranks, folder)}")
            elif whom.startswith("writer"):
                time.sleep(generator.random() * 0.3)  # training goes on
                assert all(process.is_alive() for process, _ in ranks), _stacks(ranks, folder)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()
    return whom


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def check_kills(root: Path, seed: int, count: int, stage: str | None = None) -> None:
    generator = random.Random(seed)
    model, state, number = _model(sharded=False)
    last = 0
    for i in range(count):
        whom = kill_once(root, stage, generator)
        # Writers finish what all of them can finish, and go.
        assert _wait(lambda: not writers_on(str(root))), "a writer stays behind"
        where = f"kill {i} of {whom}, seed {seed}"
        committed = steps_in(root)
        assert committed[-1:] >= [last] or not last, where
        if not committed:
            continue
        last = committed[-1]
        report = verify(root)
        assert report.ok, f"{where}: {report}"
        with AsyncCheckpointer(root) as checkpointer:
            loaded = checkpointer.load({k: state[k] for k in ("model", "optimizer", "count")})
        assert loaded == last, where
        assert number == [last], where
        tensors = [*model.parameters()]
        tensors += [t for s in state["optimizer"].optimizers[0].state.values() for t in s.values()]
        assert len(tensors) == 16
        assert {v for t in tensors for v in t.unique().tolist()} == {float(last)}, where
    assert last > 0


def test_random_kills_never_lose_or_mix_a_commit(tmp_path: Path) -> None:
    check_kills(tmp_path / "root", seed=0, count=8)


def test_random_kills_with_a_stage_never_lose_or_mix_a_commit(tmp_path: Path) -> None:
    check_kills(tmp_path / "root", seed=0, count=4, stage=str(tmp_path / "stage"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_kills_with_a_stage_never_lose_or_mix_a_commit(tmp_path: Path) -> None:
    check_kills(tmp_path / "root", seed=6, count=60, stage=str(tmp_path / "stage"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_random_kills_never_lose_or_mix_a_commit(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path / "root", seed=seed, count=40)
