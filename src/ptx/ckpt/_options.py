"""Arguments of a checkpointer, checked before anything else happens."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex


def check_options(keep: Any, keep_every: Any, slots: Any, on_busy: Any) -> None:
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
    if wrong:
        raise ValueError("AsyncCheckpointer: " + "; ".join(wrong))


def checked_step(step: SupportsIndex) -> int:
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise ValueError(f"save: step must be an integer, got {step!r}")
    number = operator.index(step)
    if not 0 <= number < 2**62:  # travels as int64
        raise ValueError(f"save: step must be 0 or more, got {number}")
    return number
