"""Random flips and cuts anywhere in a step: a load passes over it, verify names the file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import harness
import ptx
from ptx.ckpt import AsyncCheckpointer, train_state, verify

STEPS = (1, 2, 3)


def _build() -> tuple[nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, train_state(model, optimizer)


def _save(root: str) -> None:
    mesh = ptx.build_mesh(device_type="cpu")
    model, _, _ = _build()
    fully_shard(model, mesh=ptx.fsdp_mesh(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    state = train_state(model, optimizer, count=(count := [0]))
    with AsyncCheckpointer(root) as checkpointer:
        for step in STEPS:
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            count[0] = step
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            checkpointer.save(step, state, block=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged") / "root"
    harness.run(_save, 2, str(root))
    assert verify(root).ok
    assert len(list((root / "step-3").iterdir())) == 4
    return root


def damage_once(root: Path, step: int, generator: random.Random) -> tuple[Path, bytes]:
    """One flipped bit, cut or removed file; returns what it was."""
    file = generator.choice(sorted((root / f"step-{step}").iterdir()))
    whole = file.read_bytes()
    kind = generator.choice(["flip", "flip", "flip", "cut", "zeros", "missing"])
    data = bytearray(whole)
    at = generator.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << generator.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "zeros":  # a page that never reached the disk
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        if data == whole:
            data[at] ^= 1
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    return file, whole


def check_damage(root: Path, seed: int, count: int) -> None:
    generator = random.Random(seed)
    model, _, state = _build()
    count_list: list[int] = []
    state["count"] = train_state(model, count=count_list)["count"]
    del state["rng"]
    with AsyncCheckpointer(root) as checkpointer:
        for _ in range(count):
            file, whole = damage_once(root, 3, generator)
            assert checkpointer.load(state) == 2, file
            assert count_list == [2]
            assert all(p.unique().tolist() == [2.0] for p in model.parameters())
            file.write_bytes(whole)
            file, whole = damage_once(root, 1, generator)
            assert checkpointer.load(state) == 3, file
            damage = verify(root).damage
            assert {d.step for d in damage} == {1}
            assert Path(damage[0].file) == file
            file.write_bytes(whole)
    assert verify(root).ok


def test_random_damage_is_always_found(root: Path) -> None:
    check_damage(root, seed=0, count=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_much_random_damage_is_always_found(root: Path) -> None:
    check_damage(root, seed=1, count=200)


def test_damage_to_all_steps_raises_and_leaves_the_model_alone(root: Path) -> None:
    generator = random.Random(2)
    model, _, state = _build()
    del state["rng"]
    before = [p.clone() for p in model.parameters()]
    kept = [damage_once(root, step, generator) for step in STEPS]
    with (
        AsyncCheckpointer(root) as checkpointer,
        pytest.raises(RuntimeError, match="none of 3 steps verifies"),
    ):
        checkpointer.load(state)
    for file, whole in kept:
        file.write_bytes(whole)
    assert all(map(torch.equal, before, model.parameters()))
