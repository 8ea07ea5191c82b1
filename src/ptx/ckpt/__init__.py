"""Checkpoints: saved while training goes on, verified, and loaded on any mesh.

Names are resolved on first use, as in `ptx`: the writer process and ``python -m ptx.ckpt`` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx.ckpt._checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from ptx.ckpt._state import PerRank as PerRank
    from ptx.ckpt._state import train_state as train_state
    from ptx.ckpt._verify import verify as verify

_HOME = {
    "AsyncCheckpointer": "ptx.ckpt._checkpointer",
    "PerRank": "ptx.ckpt._state",
    "train_state": "ptx.ckpt._state",
    "verify": "ptx.ckpt._verify",
}

__all__ = ["AsyncCheckpointer", "PerRank", "train_state", "verify"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ptx.ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
