"""What the ranks that share a model tell each other, so that all of them raise or none does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Ranks:
    """The ranks of a mesh, or this process alone.

    Of a mesh that was sliced, the whole: what is wrong on one pipeline stage concerns the others.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        # The mesh that it was sliced from; there is no public name for it (torch 2.13).
        self.mesh = None if mesh is None else mesh._get_root_mesh()
        self._groups: list[dist.ProcessGroup | None] = []
        if self.mesh is not None:
            whole = self.mesh.size() == dist.get_world_size()
            self._groups = [None] if whole else list(self.mesh.get_all_groups())
        self.rank = dist.get_rank() if self._groups else 0

    @classmethod
    def of(cls, parts: Iterable[nn.Module]) -> Ranks:
        """The ranks of the mesh that a model is on; without one, each process is for itself."""
        parameters = (parameter for part in parts for parameter in part.parameters())
        meshes = (p.device_mesh for p in parameters if isinstance(p, DTensor))
        return cls(next(meshes, None))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, each once and in the same order everywhere; values are pickled."""
        values = [value]
        for group in self._groups:
            received: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(received, values, group)
            values = [value for part in received for value in part]
        return values

    def raise_together(self, where: str, problems: list[str]) -> None:
        """ValueError on every rank with what any rank has found."""
        self.raise_found(where, self.gather(problems))

    def raise_found(self, where: str, problems: Iterable[list[str]]) -> None:
        """ValueError with the problems of all ranks, which were gathered; each line once."""
        lines = dict.fromkeys(line for part in problems for line in part)
        if lines:
            separator = " " if len(lines) == 1 else "\n- "
            raise ValueError(f"{where}:" + "".join(separator + line for line in lines))
