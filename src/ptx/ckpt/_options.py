"""Arguments of a checkpointer, checked before anything else happens."""

from __future__ import annotations

import operator
import os
import time
from typing import Any, SupportsIndex

from ptx.ckpt._store import is_url


def check_options(
    keep: Any, keep_every: Any, slots: Any, on_busy: Any, root: Any, stage_dir: Any
) -> None:
    """Raise ValueError with all that is wrong."""
    wrong = [
        f"{name} must be an integer of at least 1, got {value!r}"
        for name, value in {"keep": keep, "keep_every": keep_every, "slots": slots}.items()
        if not (value is None and name != "slots")
        and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
    ]
    if on_busy not in ("wait", "skip"):
        wrong.append(f"on_busy must be 'wait' or 'skip', got {on_busy!r}")
    if keep is None and keep_every is not None:
        wrong.append("keep_every exempts steps from keep, which isn't given")
    if stage_dir is None and is_url(root):
        wrong.append(
            f"root {os.fspath(root)!r} is a URL, which needs stage_dir, a folder of this node"
        )
    if stage_dir is not None and is_url(stage_dir):
        wrong.append(f"stage_dir must be a folder, got the URL {os.fspath(stage_dir)!r}")
    if wrong:
        raise ValueError("AsyncCheckpointer: " + "; ".join(wrong))


def checked_step(step: SupportsIndex) -> int:
    """An integer of 0 or more; raises ValueError."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise ValueError(f"save: step must be an integer, got {step!r}")
    number = operator.index(step)
    if not 0 <= number < 2**62:  # travels as int64
        raise ValueError(f"save: step must be 0 or more, got {number}")
    return number


def new_token() -> int:
    """Of an attempt: rises with time, differs over jobs, and travels as int64."""
    return time.time_ns() // 10**6 << 20 | int.from_bytes(os.urandom(3), "big") >> 4
