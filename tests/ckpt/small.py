"""A tiny state for one process, and ways to break what a checkpointer depends on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptx.ckpt import AsyncCheckpointer, train_state


class Small:
    """A model with an optimizer that has stepped; ``fill`` makes all its tensors one number."""

    def __init__(self, *, size: int = 8, stepped: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 3, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if stepped:
            self.step()
        self.state: dict[str, Any] = train_state(self.model, self.optimizer)

    def step(self) -> None:
        self.model(torch.ones(2, self.model[0].in_features)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *states]

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for tensor in self.tensors():
            tensor.fill_(value)

    def values(self) -> set[float]:
        return {value for tensor in self.tensors() for value in tensor.unique().tolist()}


def save_filled(checkpointer: AsyncCheckpointer, small: Small, *steps: int) -> None:
    """Commits each step with all tensors equal to its number."""
    for step in steps:
        small.fill(step)
        checkpointer.save(step, small.state, meta={"step": step}, block=True)


def writer_pid(checkpointer: AsyncCheckpointer) -> int:
    writer = checkpointer._flight._writer
    assert writer is not None
    return writer.pid


@contextmanager
def stopped_writer(checkpointer: AsyncCheckpointer) -> Iterator[None]:
    """Meanwhile the writer does nothing, as on a disk that hangs."""
    pid = writer_pid(checkpointer)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def data_files(root: Path, step: int) -> list[Path]:
    return sorted((root / f"step-{step}").glob("*.distcp"))


def listed(root: Path) -> list[str]:
    """What is in a root, but for the lock of who saves there."""
    return sorted(set(os.listdir(root)) - {".lock"})
