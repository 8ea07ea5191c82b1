"""Gather what a run has to remember into a plain dict of Stateful."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ptx.ckpt._model_state import ModelState
from ptx.ckpt._optimizer_state import OptimizerState
from ptx.ckpt._parts import Part, Saved, Stateful, Targets, model_parts
from ptx.ckpt._rng import RngState

OWN_KEYS = ("model", "optimizer", "rng")


def train_state(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **extra: Any,
) -> dict[str, Stateful]:
    """What a run has to remember, as a plain dict: for `AsyncCheckpointer`, or torch's DCP.

    Tensors are keyed by the names that the model's author gave, never by wrapper names or positions,
    so a state saved from one mesh loads on any. They are referred to, not copied: make the dict once,
    each save reads the values of its moment. Nothing is ever changed by reading: a state of the
    optimizer that doesn't exist yet isn't made.

    Keys: ``"model"``: parameters, persistent buffers and what ``get_extra_state`` of modules
    returns, tied tensors once. ``"optimizer"``, if there is one: its state of each parameter it
    holds, frozen or not, and the options of its groups. ``"rng"``: random states of torch (CPU and
    the current accelerator), Python and numpy on each rank; restored on the mesh they were saved
    on, and elsewhere replaced by seeds derived from them, as `seed_ranks` does: equal over tp,
    distinct elsewhere. That is logged. Then each ``extra``.

    Args:
        model: Any module, after apply_fsdp2 and materialize; or the list of a rank's parts.
        optimizer: One, or several that share the model's parameters out.
        extra: Anything with ``state_dict`` and ``load_state_dict`` (a schedule, a loader), further
            modules, tensors, torch.Generators, and lists or dicts; the last four are loaded in
            place. Equal on all ranks, or else in a `PerRank`. For single numbers there is
            ``save(meta=...)``.

    Returns:
        A new dict; leave keys out to save or load less.

    Raises:
        ValueError: The optimizer holds parameters that aren't the model's (it was built before
            apply_fsdp2, say), parts share a name, an extra has no state or the name of another key.

    Cost: a walk over the modules. Memory that FSDP keeps gathered after a forward is freed.
    """
    if taken := [key for key in OWN_KEYS if key in extra]:
        raise ValueError(f"train_state: {taken} name parts of the state already; choose others")
    parts = model_parts(model)
    state: dict[str, Stateful] = {"model": ModelState(parts)}
    if optimizer is not None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        state["optimizer"] = OptimizerState(optimizers, parts)
    state["rng"] = RngState(parts)
    for key, value in extra.items():
        if isinstance(value, Optimizer):
            raise ValueError(f"train_state: {key!r} is an optimizer; pass optimizer=[..., {key}]")
        state[key] = stateful(key, value, where="train_state")
    return state


class PerRank:
    """State that differs by rank: saved by each rank, and loaded by the same rank of the same mesh.

    Positions in a global stream, schedules and counters are equal on all ranks and need none. On
    another mesh, or another number of ranks, a load raises naming the key, unless ``allow_missing``
    lets it be left as it is.

    Args:
        value: What `train_state` takes as an extra.
    """

    def __init__(self, value: Any) -> None:
        self.value = stateful("PerRank", value, where="PerRank")

    def state_dict(self) -> dict[str, Any]:
        return self.value.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.value.load_state_dict(state)


def stateful(key: str, value: Any, *, where: str) -> Stateful:
    """``value`` as a Stateful; raises ValueError if it can't be loaded in place."""
    if not isinstance(key, str) or not key or "." in key:
        raise ValueError(f"{where}: keys of a state are names without dots, got {key!r}")
    if isinstance(value, nn.Module):
        return ModelState([value])
    if isinstance(value, Tensor | torch.Generator | list | dict):
        return _InPlace(value)
    if isinstance(value, type) or not isinstance(value, Stateful):
        raise ValueError(
            f"{where}: {key!r} is a {type(value).__name__}, which has no state_dict() and"
            " load_state_dict(); a number can't be loaded in place: pass it as save(meta=...)"
        )
    return value


def part_of(key: str, value: Any, *, where: str) -> Part:
    """What the checkpointer works with."""
    if isinstance(value, Optimizer):
        raise ValueError(
            f"{where}: {key!r} is an optimizer, whose own state_dict() numbers its parameters; pass"
            " train_state(model, optimizer)"
        )
    value = stateful(key, value, where=where)
    if isinstance(value, Part):
        return value
    inner = value.value if isinstance(value, PerRank) else value
    if isinstance(inner, _InPlace):
        return _InPlacePart(inner, isinstance(value, PerRank))
    if isinstance(value, PerRank):
        return _OfRank(value)
    return Part(value)


class _OfRank(Part):
    per_rank = True


class _InPlacePart(Part):
    def __init__(self, stateful: _InPlace, per_rank: bool) -> None:
        super().__init__(stateful)
        self.live = stateful.value
        self.per_rank = per_rank

    def targets(self, saved: Saved) -> Targets:
        value = self.stateful.state_dict()["value"]
        if saved.notes or (isinstance(value, Tensor) and list(saved.tensors) != ["value"]):
            raise ValueError(
                f"load: what was saved isn't a {type(value).__name__}, which is what is here"
            )
        if isinstance(self.live, Tensor):
            return Targets({"value": self.live})  # itself: its shape and dtype have to fit
        return super().targets(saved)


class _InPlace:
    """A tensor, generator, list or dict, whose contents are the state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        is_generator = isinstance(self.value, torch.Generator)
        return {"value": self.value.get_state() if is_generator else self.value}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        value, new = self.value, state["value"]
        if isinstance(value, torch.Generator):
            value.set_state(new)
        elif isinstance(value, Tensor):
            if new is not value:
                with torch.no_grad():
                    value.copy_(new)
        elif type(value) is not type(new):
            raise ValueError(
                f"load: a {type(new).__name__} was saved, not a {type(value).__name__}"
            )
        else:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(new)
