"""Make sure that all ranks see one and the same root."""

from __future__ import annotations

import os
import time

from ptx.ckpt._ranks import Ranks
from ptx.ckpt._store import Store, open_store

LAG_SECONDS = 10.0  # a network file system may show a new file this late


def open_root(path: str | os.PathLike[str], ranks: Ranks) -> Store:
    """Create ``path`` if need be, and check on all ranks that it is the one of rank 0.

    Raises:
        ValueError: It is a URL that this installation can't open. On all ranks.
        RuntimeError: It can't be made, or a rank sees another folder. On all ranks.
    """
    error: Exception | None = None
    probe: str | None = None
    try:
        store = open_store(path)
    except ValueError as problem:
        error = problem
    ranks.raise_together(error)
    if ranks.rank == 0:
        try:
            store.create()
            if ranks.size > 1:
                probe = _leave_probe(store)
        except Exception as problem:
            error = RuntimeError(f"AsyncCheckpointer: {problem}")
    ranks.raise_together(error)
    if ranks.size == 1:
        return store
    name = ranks.from_first(probe)
    if name is not None:
        seen = _appears(store, name)
    else:  # read-only, so there is only what is in it to go by
        mine = store.content()
        seen = mine == ranks.from_first(mine)
    if not seen:
        error = RuntimeError(
            f"AsyncCheckpointer: {store.root} isn't the folder that rank 0 has under this name; pass"
            " one that all ranks share"
        )
    try:
        ranks.raise_together(error)
    finally:
        if probe is not None:
            store.take(probe)
    return store


def open_stage(path: str | os.PathLike[str] | None, ranks: Ranks) -> str | None:
    """Create this node's ``stage_dir`` if need be.

    Raises:
        ValueError: It can't be written to. On all ranks.
    """
    error: Exception | None = None
    stage = None if path is None else os.path.abspath(path)
    if stage is not None:
        try:
            os.makedirs(stage, exist_ok=True)
            if not os.access(stage, os.W_OK | os.X_OK):
                error = ValueError(f"AsyncCheckpointer: stage_dir {stage} can't be written to")
        except OSError as problem:
            error = ValueError(f"AsyncCheckpointer: stage_dir {stage} can't be made: {problem}")
    ranks.raise_together(error)
    return stage


def _leave_probe(store: Store) -> str | None:
    """A new file for the other ranks to find; None if nothing can be written here, only loaded."""
    name = f".probe-{os.urandom(6).hex()}"
    try:
        store.leave(name)
    except Exception:
        return None
    return name


def _appears(store: Store, name: str) -> bool:
    deadline = time.monotonic() + LAG_SECONDS
    while not store.has(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
