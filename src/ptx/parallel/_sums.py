"""Sums over tensors that are spread over ranks: which groups hold the other shards, and local norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

ROW = 512  # entries; their sum in float32 is off by some 1e-7

Ranks = tuple[int, ...]  # the global ranks of a process group


class Spread:
    """Finds, for one tensor after another, the rank groups that hold different shards of it.

    Attributes:
        groups: The process groups found so far, by their ranks. Two meshes over the same ranks have
            two groups, of which one serves.
    """

    def __init__(self) -> None:
        self.groups: dict[Ranks, dist.ProcessGroup] = {}
        self._known: dict[tuple[DeviceMesh, tuple[Placement, ...]], tuple[Ranks, ...]] = {}

    def of(self, tensor: Tensor) -> tuple[Ranks, ...]:
        """A sum over all shards is one over these groups, one after the other; () if there are none."""
        if not isinstance(tensor, DTensor):
            return ()
        layout = (tensor.device_mesh, tensor.placements)
        if layout not in self._known:
            self._known[layout] = tuple(
                self.group(tensor.device_mesh, dim)
                for dim, placement in enumerate(tensor.placements)
                if tensor.device_mesh.size(dim) > 1 and not placement.is_replicate()
            )
        return self._known[layout]

    def group(self, mesh: DeviceMesh, dim: int) -> Ranks:
        """The ranks along one dim of a mesh; adds their group to ``groups`` if it is new."""
        group = mesh.get_group(dim)
        ranks = tuple(dist.get_process_group_ranks(group))
        self.groups.setdefault(ranks, group)
        return ranks


def sum_device(tensors: Iterable[Tensor], other: DeviceMesh | None = None) -> torch.device:
    """Where the collectives work, which isn't where tensors are that FSDP offloads.

    Args:
        tensors: Parameters.
        other: A mesh that takes part besides those of the tensors.
    """
    tensors = list(tensors)
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), other)
    if mesh is None:
        return tensors[0].device if tensors else torch.device("cpu")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def sum_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if double else torch.float32


def norms(tensors: list[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each tensor, 0-dim, of ``dtype``; all of one device and dtype, none empty."""
    if tensors[0].is_complex():
        tensors = [tensor.abs() for tensor in tensors]
    if tensors[0].device.type == "cpu":
        return [_norm_by_rows(tensor, p, dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, p, dtype=dtype))  # private: nothing public takes many


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and dtype each, as the foreach kernels want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def _norm_by_rows(tensor: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Norm of norms of short rows: torch's CPU kernel adds one by one, off by 4e-4 at 10^7."""
    values = tensor.reshape(-1)
    while values.numel() > ROW:
        end = values.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(values[:end].view(-1, ROW), p, dim=1, dtype=dtype)
        values = torch.cat([rows, values[end:].to(dtype)])
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=dtype)
    return norm
