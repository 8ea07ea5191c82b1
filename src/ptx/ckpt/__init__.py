"""Checkpoints: saved while training goes on, verified, and loaded on any mesh."""

from ptx.ckpt._checkpointer import AsyncCheckpointer as AsyncCheckpointer
from ptx.ckpt._state import PerRank as PerRank
from ptx.ckpt._state import train_state as train_state
from ptx.ckpt._verify import verify as verify

__all__ = ["AsyncCheckpointer", "PerRank", "train_state", "verify"]
