"""Make sure that all ranks see one and the same folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ptx.ckpt import _disk
from ptx.ckpt._ranks import Ranks

LAG_SECONDS = 10.0  # a network file system may show a new file this late


def open_root(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """Create ``path`` if need be, and check on all ranks that it is the one of rank 0.

    Raises:
        RuntimeError: It can't be made, or a rank sees another folder. On all ranks.
    """
    root = Path(path).absolute()
    error: Exception | None = None
    probe: str | None = None
    if ranks.rank == 0:
        try:
            if not root.is_dir():
                root.mkdir(parents=True, exist_ok=True)
                _disk.sync_folder(os.fspath(root.parent))
            if ranks.size > 1:
                probe = _leave_probe(root)
        except OSError as problem:
            error = RuntimeError(f"AsyncCheckpointer: {problem}")
    ranks.raise_together(error)
    if ranks.size == 1:
        return root
    name = ranks.from_first(probe)
    if name is not None:
        seen = _appears(root / name)
    else:  # read-only, so there is only what is in it to go by
        mine = sorted(os.listdir(root)) if root.is_dir() else None
        seen = mine == ranks.from_first(mine)
    if not seen:
        error = RuntimeError(
            f"AsyncCheckpointer: {root} isn't the folder that rank 0 has under this name; pass one"
            " that all ranks share"
        )
    try:
        ranks.raise_together(error)
    finally:
        if probe is not None:
            (root / probe).unlink(missing_ok=True)
    return root


def _leave_probe(root: Path) -> str | None:
    """A new file for the other ranks to find; None if nothing can be written here, only loaded."""
    name = f".probe-{os.urandom(6).hex()}"
    try:
        (root / name).touch(exist_ok=False)
    except OSError:
        return None
    return name


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + LAG_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
