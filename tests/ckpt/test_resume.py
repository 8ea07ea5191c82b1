"""A run that is killed and resumed is the run that never was, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness
from ckpt.conftest import writers_on
from ckpt.training import assert_equal, full_tensors, options, start, world_size
from ptx.ckpt import AsyncCheckpointer, train_state

EVERY, KILLED_AT, STEPS = 4, 7, 4 + 20


def train(mesh_name: str, root: str, kill: bool) -> Any:
    """Resumes by itself; returns what is to be compared, or is killed."""
    run = start(mesh_name)
    run.dropout = 0.0 if "tp" in mesh_name else 0.1  # torch has no dropout of DTensors on CPU
    torch.manual_seed(dist.get_rank())  # dropout differs by rank
    with AsyncCheckpointer(root, keep=2) as checkpointer:
        first = checkpointer.load(run.state) or 0
        for step in range(first + 1, STEPS + 1):
            run.train(1)
            checkpointer.poll()
            if step % EVERY == 0:
                checkpointer.save(step, run.state)
            if kill and step == KILLED_AT:
                checkpointer.wait()
                checkpointer.save(step, run.state)  # may be committed or not
                if dist.get_rank() == 0:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
    return first, run.losses, full_tensors(run.state), options(run), run.data.seen


@pytest.mark.parametrize("mesh_name", ["dp2", "dp2 x tp2"])
def test_killed_and_resumed_equals_uninterrupted(mesh_name: str, tmp_path: Path) -> None:
    ranks = world_size(mesh_name)
    whole = harness.run(train, ranks, mesh_name, str(tmp_path / "a"), False)
    with pytest.raises(AssertionError, match="died without an answer"):
        harness.run(train, ranks, mesh_name, str(tmp_path / "b"), True)
    resumed = harness.run(train, ranks, mesh_name, str(tmp_path / "b"), False)
    for one, other in zip(whole, resumed, strict=True):
        first = other[0]
        assert first in (EVERY, KILLED_AT)
        assert other[1] == one[1][first:]  # losses, all of the last 17 to 20
        assert_equal(other[2], one[2])
        assert other[3:4] == one[3:4]
        assert other[4] == one[4][first * 8 :]
        assert len(other[1]) == STEPS - first


def test_one_rank_killed_while_a_step_is_saved_again_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without an answer"):
        harness.run(_save_again, 2, str(tmp_path))
    deadline = time.monotonic() + 30
    while writers_on(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    model = nn.Linear(300, 300)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.load({"model": model}) == 5
        values = {v for p in model.parameters() for v in p.unique().tolist()}
        assert values == {1.0}
        checkpointer.save(6, train_state(model), block=True)
    assert sorted(os.listdir(tmp_path)) == ["step-5", "step-6"]


def _save_again(root: str) -> None:
    from ckpt.small import writer_pid
    from ptx.ckpt import _writer_process

    _writer_process.ORPHAN_SECONDS = 0.2
    model = nn.Linear(300, 300)
    state = train_state(model)
    checkpointer = AsyncCheckpointer(root)
    for value in (1.0, 2.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        if value == 2.0 and dist.get_rank() == 1:
            os.kill(writer_pid(checkpointer), signal.SIGSTOP)
        checkpointer.save(5, state, block=value == 1.0)
    time.sleep(0.3)  # rank 0's part is durable
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(writer_pid(checkpointer), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
