"""What a checkpoint is made of: the one interface that models, optimizers and any Stateful take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict(state)``, as in torch's DCP."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Spec:
    """A saved tensor, whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Saved:
    """What a checkpoint has under one key: tensors by their names below it, and notes on them."""

    tensors: dict[str, Spec]
    notes: dict[str, Any]


@dataclass
class Targets:
    """Where a load goes.

    Attributes:
        tensors: By saved name, what to write into; live ones, or new ones that ``load`` hands on.
        missing: Names that the checkpoint should have.
        extras: Of the notes' ``"extra"``, which are taken.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)


class Part:
    """One key of a state. This class serves any Stateful; models and optimizers have their own.

    Attributes:
        split: Ranks may hold different names (pipeline stages); what several hold is equal.
        per_rank: Each rank has its own, which is of use on the same mesh only.
        derives: Of a ``per_rank`` part: it can make do on another mesh.
    """

    split = False
    per_rank = False
    derives = False

    def __init__(self, stateful: Stateful) -> None:
        self.stateful = stateful

    def read(self) -> tuple[Any, dict[str, Any]]:
        """The state, as nested plain values and tensors by reference; and notes on its names."""
        return self.stateful.state_dict(), {}

    def compared(self, names: Iterable[str]) -> list[str]:
        """The plain tensors, named as below the key, whose bits ranks have to agree on."""
        return list(names)

    def targets(self, saved: Saved) -> Targets:
        live: dict[str, Tensor] = {}
        find_tensors(self.stateful.state_dict(), "", live)
        made = {name: new_like(spec, live.get(name)) for name, spec in saved.tensors.items()}
        return Targets(made)

    def write(self, state: Any, saved: Saved) -> None:
        """Take over a state whose tensors are those of ``targets(saved)``, filled."""
        self.stateful.load_state_dict(state)

    def on_other_mesh(self, state: Any, step: int) -> str:
        """If it ``derives``: make do with rank 0's state; returns what to report."""
        raise NotImplementedError


def find_tensors(value: Any, name: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            find_tensors(item, f"{name}.{key}" if name else str(key), found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            find_tensors(item, f"{name}.{i}" if name else str(i), found)


@torch.inference_mode(False)  # such tensors could never be changed outside of it
def new_like(spec: Spec, live: Tensor | None) -> Tensor:
    """An empty tensor laid out as the one that the object has now, else a plain one on CPU."""
    if live is None or tuple(live.shape) != spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    if live.is_meta:
        return live  # refused by the caller
    with torch.no_grad():
        return torch.empty_like(live.detach(), dtype=spec.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def model_parts(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)
