"""The table of losses: what a cell is, which cells make sense, and covers of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

from loss.conformance_losses import CHUNKED, LOSSES, OF_LOGITS, fits

PLACEMENTS: dict[str, dict[str, int]] = {
    "plain": {},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "FSDP2": {"dp_shard": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP2 x tp 2": {"dp_shard": 2, "tp": 2},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.02},
    "cap": {"softcap": 1.5},
    "scale": {"logit_scale": 0.7},
    "class 1 ignored": {"ignore_index": 1},
    "all": {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 1.5, "logit_scale": 0.7},
    # Of token_logprobs.
    "temperature": {"temperature": 0.6},
    "entropy": {"entropy": True},
    "all of RL": {"temperature": 0.6, "entropy": True, "softcap": 1.5, "logit_scale": 0.7},
}
# Four ranks take their time; the quick cover has fewer options and calls there.
SLOW = ("tp 4", "HSDP 2 x 2", "FSDP2 x tp 2")
FEWER = {
    "options": ("defaults", "all", "all of RL"),
    "calls": ("once", "two forwards", "window", "frozen body"),
}
# A head's rows and real classes: 13 rows are split 7 6 and 4 4 4 1, 3 over 4 ranks leave one without.
VOCABULARIES = {"13": (13, 13), "12": (12, 12), "3": (3, 3), "7 of 13": (13, 7)}
GROUPS = ("alone", "with norm", "root", "tied root", "tied with norm")


@dataclass(frozen=True)
class Cell:
    """One loss in one situation; what isn't named is as it is in most programs."""

    loss: str = "fused_linear_ce"
    group: str = "alone"  # of FSDP; without it "module", "tied", or the bare "weight"
    dtype: str = "fp32"  # also bf16, fp64, autocast, and "policy": FSDP's bf16 with fp32 sums
    reduction: str = "mean"
    options: str = "defaults"
    vocabulary: str = "13"
    bias: bool = True
    labels: str = "ragged"
    layout: str = "plain"  # of hidden states and logits
    chunk: int | None = None
    scaled: bool = True  # whether the gradient that comes in is 1
    calls: str = "once"

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        unusual = [f"{k}={v}" for k, v in given.items() if v != getattr(Cell, k) or k == "loss"]
        return ", ".join(unusual)


def factors(placement: str) -> dict[str, tuple[Any, ...]]:
    """The values of each field of a cell on this placement."""
    degrees = PLACEMENTS[placement]
    fsdp, tp = "dp_shard" in degrees, "tp" in degrees
    dtypes = ("fp32", "bf16", "fp64", "autocast")
    labels = ("ragged", "all ignored", "no tokens", "one token", "huge")
    layouts = ("plain", "2-D", "strided")
    calls = ("once", "two backwards", "two forwards", "dropped", "written")
    return {
        "loss": LOSSES,
        "group": GROUPS if fsdp else ("module", "weight", "tied"),
        "dtype": (*dtypes, "policy") if fsdp else dtypes,
        "reduction": ("mean", "sum", "none"),
        "options": tuple(OPTIONS),
        "vocabulary": tuple(VOCABULARIES),
        "bias": (True, False),
        "labels": (*labels, "one rank ignored", "one rank without tokens") if fsdp else labels,
        "layout": (*layouts, "Shard(1)", "Replicate()") if tp else layouts,
        "chunk": (None, 1, 3),
        "scaled": (True, False),
        "calls": (*calls, "window", "frozen weight", "frozen hidden", "frozen body"),
    }


def quick_factors(placement: str) -> dict[str, tuple[Any, ...]]:
    return factors(placement) | (FEWER if placement in SLOW else {})


def makes_sense(cell: Cell) -> bool:
    of_logits, tied = cell.loss in OF_LOGITS, "tied" in cell.group
    few = cell.labels in ("no tokens", "one token", "one rank without tokens")
    return not (
        (cell.chunk is not None and cell.loss not in CHUNKED)
        or (cell.reduction == "none" and not cell.scaled)
        or (of_logits and (cell.group == "weight" or cell.calls == "frozen hidden"))
        or (cell.loss == "vocab_parallel_ce" and cell.layout == "Replicate()")
        or (tied and cell.calls in ("frozen weight", "frozen body"))
        # Of a sharded sequence there is no part that all ranks have; torch can't flatten an empty DTensor.
        or (few and cell.layout == "Shard(1)")
        or (few and of_logits and cell.layout == "2-D")
        # The root of plain fully_shard stays gathered after a forward under no_grad, whatever the loss.
        or (of_logits and "root" in cell.group and cell.calls == "written")
        # torch's optimizers take no DTensor of which a rank has nothing.
        or (cell.vocabulary == "3" and cell.calls == "written")
        # Nothing is left of huge logits in 8 bits, nor of the slope of a cap.
        or (cell.labels == "huge" and cell.dtype not in ("fp32", "fp64"))
        or (cell.labels == "huge" and "softcap" in OPTIONS[cell.options])
        or not fits(cell.loss, OPTIONS[cell.options])
    )


def every_option(placement: str, group: str) -> Iterator[Cell]:
    """Losses, dtypes, reductions and options in all combinations."""
    yield from _all_of(placement, group, "loss", "dtype", "reduction", "options")


def every_call(placement: str, group: str) -> Iterator[Cell]:
    """Losses, kinds of labels, layouts and ways of calling in all combinations."""
    yield from _all_of(placement, group, "loss", "labels", "layout", "calls")


def _all_of(placement: str, group: str, *names: str) -> Iterator[Cell]:
    """The product of some factors; the others are drawn, among those that make sense with these."""
    values = factors(placement)
    for row in product(*(values[name] for name in names)):
        draw = random.Random(repr((placement, group, row)))
        for _ in range(200):
            given = {name: draw.choice(value) for name, value in values.items()}
            cell = Cell(**given | dict(zip(names, row)) | {"group": group})
            if makes_sense(cell):
                yield cell
                break


@functools.cache
def pairwise(placement: str) -> tuple[Cell, ...]:
    """Cells in which any two values of different factors meet, if they make sense together."""
    draw, values = random.Random(0), quick_factors(placement)
    missing = {
        ((a, x), (b, y)) for a, b in combinations(values, 2) for x in values[a] for y in values[b]
    }
    cells: list[Cell] = []
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        best, gain, found = None, 0, 0
        for _ in range(300):  # a pair that none of these completes makes no sense: a test asks
            cell = Cell(**{name: draw.choice(value) for name, value in values.items()} | dict(pair))
            if makes_sense(cell):
                found += 1
                if (new := len(missing & pairs_of(cell))) > gain:
                    best, gain = cell, new
            if found == 20:
                break
        if best is not None:
            cells.append(best)
            missing -= pairs_of(best)
    return tuple(cells)


def pairs_of(cell: Cell) -> set[Any]:
    return set(combinations(vars(cell).items(), 2))
