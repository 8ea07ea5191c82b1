"""The random states of a rank: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptx.ckpt._parts import Part


class RngState(Part):
    """What `train_state` keeps as ``"rng"``; each rank has its own.

    Args:
        parts: The model, whose mesh tells which ranks have to draw alike.
    """

    per_rank = True
    derives = True

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = list(parts)
        self.stateful = self

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {
                "version": version,
                "words": torch.tensor(words, device="cpu"),
                "gauss": gauss,
            },
        }
        if accelerator := torch.accelerator.current_accelerator(check_available=True):
            state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
        if numpy := sys.modules.get("numpy"):
            kind, keys, position, has_gauss, gauss = numpy.random.get_state()
            keys = torch.tensor(keys.astype("int64"), device="cpu")
            state["numpy"] = [kind, keys, position, has_gauss, gauss]
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        torch.set_rng_state(state["torch"].cpu())
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator and accelerator.type in state:
            torch.get_device_module(accelerator).set_rng_state(state[accelerator.type].cpu())
        if "numpy" in state and (numpy := sys.modules.get("numpy")):
            kind, keys, *rest = state["numpy"]
            numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype="uint32"), *rest))

    def on_other_mesh(self, state: Any, step: int) -> str:
        first = bytes(state["torch"].tolist())
        key = blake2b(
            repr((first, step, _coordinates(self.parts))).encode(), digest_size=7
        ).digest()
        seed = int.from_bytes(key, "little")
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        return "saved on another mesh; seeded anew from it, equal over tp and distinct elsewhere"


def _coordinates(parts: Sequence[nn.Module]) -> Any:
    """This rank's place in all mesh dims but tp, whose ranks hold the same activations."""
    tensors: list[Tensor] = [p for part in parts for p in part.parameters()]
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            # Private (torch 2.13 has no other way): a parameter knows only the dims it is sharded over.
            root: DeviceMesh = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
            coordinate, names = root.get_coordinate(), root.mesh_dim_names
            if coordinate is not None and names is not None:
                return [(n, c) for n, c in zip(names, coordinate) if n != "tp"]
    return dist.get_rank() if dist.is_initialized() else 0
