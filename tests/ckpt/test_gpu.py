"""On an accelerator: staged through pinned memory, with the values of the call."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ptx
from ptx.ckpt import AsyncCheckpointer, train_state, verify

pytestmark = pytest.mark.gpu


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_C01_on_an_accelerator_and_the_next_steps_are_the_same(tmp_path: Path) -> None:
    model, optimizer = build()
    state = train_state(model, optimizer, data=torch.arange(3, device="cuda"))
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        assert all(slot._pinned for slot in checkpointer._flight.slots)
        draws = torch.rand(4, device="cuda")
        for _ in range(3):
            step(model, optimizer)
        checkpointer.wait()
        fresh, other = build()
        with torch.no_grad():
            for p in fresh.parameters():
                p.zero_()
        other.state.clear()
        loaded = train_state(fresh, other, data=torch.zeros(3, dtype=torch.int64, device="cuda"))
        assert checkpointer.load(loaded) == 1
        assert torch.equal(torch.rand(4, device="cuda"), draws)
        assert all(s["step"].is_cuda for s in other.state.values())
        for _ in range(3):
            step(fresh, other)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    assert verify(tmp_path).ok


def test_sharded_on_one_accelerator(tmp_path: Path) -> None:
    mesh = ptx.build_mesh()
    assert mesh.device_type == "cuda"
    model, _ = build()
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), units=["0", "1", "2", "3"])
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = train_state(model, optimizer)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        want = [p.full_tensor() for p in model.parameters()]
        step(model, optimizer)
        optimizer.state.clear()
        assert checkpointer.load(state) == 1
    assert all(torch.equal(p.full_tensor(), one) for p, one in zip(model.parameters(), want))
    dist.destroy_process_group()
