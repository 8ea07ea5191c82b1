"""Histograms of parameters, gradients and activations, of the whole tensors whatever shards them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ptx

PIECE = 2**22  # entries counted at once; bounds the copies

Layout = tuple[tuple[DeviceMesh, int], ...]  # mesh dims whose ranks hold different parts


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` finite entries lie in the i-th of equal parts of [low, high]."""

    low: float
    high: float
    counts: list[int]
    nonfinite: int


@torch.no_grad()
def histograms(
    tensors: Mapping[str, Tensor], *, bins: int = 64, spread: Sequence[DeviceMesh] = ()
) -> dict[str, Histogram]:
    """Counts every entry of each tensor once, equal on all ranks: no sample, no gather.

    Args:
        tensors: Plain or DTensors on any mesh; the same names, in the same order, on every rank.
        bins: Parts between the smallest and the largest entry, over all shards.
        spread: 1-D meshes whose ranks have different parts of plain tensors too. None for parameters;
            for activations ``[ptx.loss_mesh(mesh)]``, and ``mesh["tp"]`` if sequence parallel splits
            them.

    Cost: some reads of every entry. Two small all-reduces for each mesh dim that shards any of the
    tensors, [n, 2] and [n, bins + 1]; one wait for the device. Partial DTensors are summed first.
    """
    local: dict[str, Tensor] = {}
    of_layout: dict[Layout, list[str]] = {}
    for name, tensor in tensors.items():
        local[name], layout = _local(tensor)
        layout += tuple((mesh, 0) for mesh in spread if mesh.size() > 1)
        of_layout.setdefault(layout, []).append(name)
    found: dict[str, Histogram] = {}
    for layout, names in of_layout.items():
        ends = torch.stack([_ends(local[name]) for name in names])  # [n, 2]: -low, high
        _all_reduce(ends, layout, dist.ReduceOp.MAX)
        rows = torch.stack([_count(local[name], end, bins) for name, end in zip(names, ends)])
        _all_reduce(rows, layout, dist.ReduceOp.SUM)
        for name, (low, high), row in zip(names, ends.tolist(), rows.tolist()):
            found[name] = Histogram(-low, high, row[:-1], row[-1])
    return {name: found[name] for name in tensors}


def model_tensors(model: nn.Module, *, only: Sequence[str] = ()) -> dict[str, Tensor]:
    """``{"param/<name>": ..., "grad/<name>": ...}`` of the parameters, for `histograms`.

    Args:
        model: After the last backward of a step, before ``zero_grad``.
        only: Keep names with one of these dotted parts at their start; (): all.
    """
    chosen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not only or any(f"{name}.".startswith(f"{start}.") for start in only)
    }
    params = {f"param/{name}": parameter.detach() for name, parameter in chosen.items()}
    return params | {f"grad/{n}": p.grad for n, p in chosen.items() if p.grad is not None}


class Activations:
    """Keeps what the model's blocks return while ``on``, for `histograms`.

    Args:
        model: After the ``apply_*`` calls.
        only: Names of modules; (): the blocks that ``ptx.find_blocks`` finds.

    Cost: while on, the blocks' outputs stay in memory until `take`.
    """

    def __init__(self, model: nn.Module, only: Sequence[str] = ()) -> None:
        self.on = False
        self._kept: dict[str, list[Tensor]] = {}
        modules = dict(model.named_modules())
        self._hooks = [
            modules[name].register_forward_hook(self._keeper(name))
            for name in only or ptx.find_blocks(model)
        ]

    def take(self) -> dict[str, Tensor]:
        """``{"activation/<block>": ...}``, micro-batches in one; then forgets."""
        kept, self._kept = self._kept, {}
        return {f"activation/{name}": torch.cat(parts) for name, parts in kept.items()}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, name: str) -> Any:
        def keep(_: nn.Module, __: Any, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if self.on and isinstance(first, Tensor) and torch.is_grad_enabled():  # not validation
                self._kept.setdefault(name, []).append(first.detach())

        return keep


def write_histograms(path: Path, step: int, found: Mapping[str, Histogram]) -> None:
    """Appends one line of JSON per histogram: step, name, low, high, counts, nonfinite."""
    with path.open("a") as file:
        for name, histogram in found.items():
            file.write(json.dumps({"step": step, "name": name, **vars(histogram)}) + "\n")


def _local(tensor: Tensor) -> tuple[Tensor, Layout]:
    if not isinstance(tensor, DTensor):
        return tensor, ()
    if any(placement.is_partial() for placement in tensor.placements):
        whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tensor.to_local(), tuple((mesh, dim) for dim in dims if mesh.size(dim) > 1)


def _ends(tensor: Tensor) -> Tensor:
    """[-low, high] of the finite entries, float32; minus infinity where there are none."""
    ends = tensor.new_full((2,), -torch.inf, dtype=torch.float32)
    for piece in _pieces(tensor):
        finite = piece.isfinite()
        tops = torch.stack([part.where(finite, -torch.inf).amax() for part in (-piece, piece)])
        ends = torch.maximum(ends, tops)
    return ends


def _count(tensor: Tensor, ends: Tensor, bins: int) -> Tensor:
    """[bins + 1] int64: the last one counts what isn't finite. All entries alike: the first bin."""
    counts = tensor.new_zeros(bins + 1, dtype=torch.int64)
    minus_low, width = ends[0], ends.sum()
    scale = torch.where(width > 0, bins / width, 0.0)
    for piece in _pieces(tensor):
        places = ((piece + minus_low) * scale).clamp(0, bins - 1)
        places = places.where(piece.isfinite(), bins).long()
        counts += torch.bincount(places, minlength=bins + 1)
    return counts


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    return (piece.float() for piece in tensor.reshape(-1).split(PIECE) if piece.numel())


def _all_reduce(numbers: Tensor, layout: Layout, op: dist.ReduceOp.RedOpType) -> None:
    for mesh, dim in layout:
        dist.all_reduce(numbers, op, mesh.get_group(dim))
