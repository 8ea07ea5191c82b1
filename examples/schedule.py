"""The learning rate over a run."""

from __future__ import annotations

import math


def lr_factor(step: int, *, warmup: int, steps: int) -> float:
    """Linear warm-up to 1, then a cosine from 1 to 0.1; times the peak learning rate."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
