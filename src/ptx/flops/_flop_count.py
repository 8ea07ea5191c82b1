"""The result of a count: FLOPs of forward, backward and recomputation, by op and by module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Causal = Literal["full", "half"]
Phase = Literal["forward", "backward", "recompute"]

UNITS = ("", "K", "M", "G", "T", "P", "E", "Z", "Y")  # powers of 1000
TABLE_DEPTH = 3  # components of a module's name


@dataclass(frozen=True)
class Flops:
    """Floating point operations, a multiply-add counted as 2.

    Attributes:
        forward: Of the forward.
        backward: Of the gradients.
        recompute: Of what the backward runs once more: activation checkpointing, chunked losses.
    """

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        """Forward and backward: what the model needs, however it is executed. For `mfu`."""
        return self.forward + self.backward

    @property
    def hardware_total(self) -> int:
        """All three: what the devices execute. For `hfu`."""
        return self.total + self.recompute

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
        )

    def as_dict(self) -> dict[str, int]:
        """All five numbers by name."""
        names = ("forward", "backward", "recompute", "total", "hardware_total")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class FlopCount(Flops):
    """What `estimate_flops_fake` and `transformer_flops` return, for the whole model and batch.

    ``str()`` gives a table.

    Attributes:
        causal: How attention called with ``is_causal=True`` is counted: "full", the whole
            square of queries and keys, or "half", the pairs that the mask leaves.
        by_op: "mm", "attention", "convolution" ... -> its part.
        by_module: Name -> what ran in the module and the modules in it; "" is all.
    """

    causal: Causal = "full"
    by_op: Mapping[str, Flops] = field(default_factory=dict)
    by_module: Mapping[str, Flops] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts; ``by_op`` and ``by_module`` as nested dicts."""
        return {
            **super().as_dict(),
            "causal": self.causal,
            "by_op": {name: part.as_dict() for name, part in self.by_op.items()},
            "by_module": {name: part.as_dict() for name, part in self.by_module.items()},
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __str__(self) -> str:
        rows = [("", *_HEADER), *_module_rows(self), *_op_rows(self)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in rows
        ]
        head = f'FLOPs of the whole batch, a multiply-add is 2, causal attention "{self.causal}"'
        return "\n".join([head, *lines])


def count_of(pieces: Iterable[tuple[str, str, Phase, int]], causal: Causal) -> FlopCount:
    """Add up (module, op, phase, FLOPs)."""
    all_of = Flops()
    by_op: dict[str, Flops] = {}
    by_module: dict[str, Flops] = {"": all_of}
    for module, op, phase, flops in pieces:
        piece = Flops(**{phase: flops})
        all_of += piece
        by_op[op] = by_op.get(op, Flops()) + piece
        parts = module.split(".") if module else []
        for depth in range(len(parts) + 1):
            name = ".".join(parts[:depth])
            by_module[name] = by_module.get(name, Flops()) + piece
    return FlopCount(all_of.forward, all_of.backward, all_of.recompute, causal, by_op, by_module)


_HEADER = ("forward", "backward", "recompute", "total", "share")
_Row = tuple[str, ...]


def _module_rows(count: FlopCount) -> list[_Row]:
    """The outer modules, those with equal names but for numbers as one: layers.* (32)."""
    merged: dict[str, Flops] = {}
    members: dict[str, set[str]] = {}
    for name, part in count.by_module.items():
        parts = name.split(".") if name else []
        glob = ".".join("*" if p.isdigit() else p for p in parts)
        if len(parts) <= TABLE_DEPTH:
            merged[glob] = merged.get(glob, Flops()) + part
            members.setdefault(glob, set()).add(name)
    rows = []
    for glob in sorted(merged, key=lambda g: _order(g, list(merged))):
        parts = glob.split(".") if glob else []
        number = f" ({len(members[glob])})" if parts and parts[-1] == "*" else ""
        label = "  " * len(parts) + (parts[-1] if parts else "all") + number
        rows.append(_row(label, merged[glob], count))
    return rows


def _order(glob: str, globs: list[str]) -> list[int]:
    """Depth first, siblings in the order they first ran."""
    parts = glob.split(".") if glob else []
    return [globs.index(".".join(parts[: depth + 1])) for depth in range(len(parts))]


def _op_rows(count: FlopCount) -> list[_Row]:
    largest = sorted(count.by_op.items(), key=lambda item: -item[1].hardware_total)
    return [_row(f"op {name}", part, count) for name, part in largest]


def _row(label: str, part: Flops, count: FlopCount) -> _Row:
    numbers = (part.forward, part.backward, part.recompute, part.total)
    share = part.total / count.total if count.total else 0.0
    return label, *map(_short, numbers), f"{share:.1%}"


def _short(flops: int) -> str:
    """Four digits and a unit: 57.91 G."""
    value, unit = float(flops), 0
    while value >= 999.95 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.4g} {UNITS[unit]}".strip()
