"""Optimizer state by parameter name, read and written directly, so that no step is ever run for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ptx.ckpt._model_state import named_tensors, require_notes, saved_names, tied
from ptx.ckpt._parts import Part, Saved, Spec, Targets, find_tensors, new_like

# How a step is computed, not what: a load leaves these as the optimizer was built.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Group = dict[str, Any]


class OptimizerState(Part):
    """What `train_state` makes of optimizers: ``{"state": {name: ...}, "param_groups": {"0": ...}}``.

    Whether parameters are frozen doesn't matter: what the optimizer holds is saved, and what a
    parameter has no state of (it was never stepped) it has none of after a load.

    Args:
        optimizers: Over parameters of ``parts``; their groups are numbered through.
        parts: The model, or its parts on this rank.
    """

    split = True

    def __init__(self, optimizers: Sequence[Optimizer], parts: Sequence[nn.Module]) -> None:
        self.optimizers = list(optimizers)
        self.parts = list(parts)
        self.stateful = self
        self._names()  # raises now, not at the first save

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, by clean parameter name. Changes nothing, not even an empty state."""
        state, _ = self.read()
        return dict(state)

    def read(self) -> tuple[Any, dict[str, Any]]:
        names, groups = self._names(), self._groups()
        state = {
            names[parameter]: optimizer.state[parameter]
            for optimizer, _, group in groups
            for parameter in group["params"]
            if parameter in optimizer.state
        }
        options = {key: _options(group) for _, key, group in groups}
        group_of = {names[p]: key for _, key, group in groups for p in group["params"]}
        notes = {"group_of": group_of, "tied": tied(named_tensors(self.parts)[1])}
        return {"state": state, "param_groups": options}, notes

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take over states and options; parameters that ``state`` doesn't have lose theirs."""
        names = self._names()
        for optimizer, key, group in self._groups():
            for parameter in group["params"]:
                if names[parameter] in state["state"]:
                    optimizer.state[parameter] = state["state"][names[parameter]]
                else:
                    optimizer.state.pop(parameter, None)
            _set_options(group, state["param_groups"].get(key, {}))

    def compared(self, names: Iterable[str]) -> list[str]:
        return []  # as for the parameters

    def targets(self, saved: Saved) -> Targets:
        require_notes(saved, "group_of", "an optimizer")
        names, group_of = self._saved_names(saved), saved.notes["group_of"]
        by_parameter: dict[str, list[str]] = {}
        for path in saved.tensors:
            if path.startswith("state."):
                by_parameter.setdefault(_parameter_of(path, group_of), []).append(path)
        targets = Targets()
        for optimizer, key, group in self._groups():
            for parameter in group["params"]:
                name, is_saved = names[parameter]
                if not is_saved:
                    targets.missing.append(f"state.{name}")
                live: dict[str, Tensor] = {}
                if parameter in optimizer.state:
                    find_tensors(optimizer.state[parameter], f"state.{name}", live)
                for path in by_parameter.get(name, ()):
                    if path not in live:
                        live[path] = _new_state(saved.tensors[path], parameter, group)
                    targets.tensors[path] = live[path]
            saved_key = _saved_key(key, [names[p][0] for p in group["params"]], group_of)
            for path in saved.tensors:
                option = path.removeprefix(f"param_groups.{saved_key}.")
                if option != path and path not in targets.tensors:
                    value, spec = group.get(option), saved.tensors[path]
                    if not isinstance(value, Tensor):
                        value = new_like(spec, None)
                    targets.tensors[path] = value
        return targets

    def write(self, state: Any, saved: Saved) -> None:
        here, names = self._names(), self._saved_names(saved)
        options, states = {}, {}
        for _, key, group in self._groups():
            known = [names[p][0] for p in group["params"]]
            saved_key = _saved_key(key, known, saved.notes["group_of"])
            options[key] = state["param_groups"].get(saved_key, {})
            for parameter in group["params"]:
                name, is_saved = names[parameter]
                if is_saved and name in state["state"]:
                    states[here[parameter]] = state["state"][name]
        self.load_state_dict({"state": states, "param_groups": options})

    def _saved_names(self, saved: Saved) -> dict[Tensor, tuple[str, bool]]:
        """What each parameter is called in the checkpoint, and whether its optimizer held it."""
        tensors, aliases = named_tensors(self.parts)
        found = saved_names(aliases, saved.notes["tied"], saved.notes["group_of"])
        return {
            tensor: (found[name] or name, found[name] is not None)
            for name, tensor in tensors.items()
        }

    def _groups(self) -> list[tuple[Optimizer, str, Group]]:
        groups = [(o, group) for o in self.optimizers for group in o.param_groups]
        return [(optimizer, str(i), group) for i, (optimizer, group) in enumerate(groups)]

    def _names(self) -> dict[Tensor, str]:
        tensors, _ = named_tensors(self.parts)
        names: dict[Tensor, str] = {tensor: name for name, tensor in tensors.items()}
        held = [p for _, _, group in self._groups() for p in group["params"]]
        if foreign := [tuple(p.shape) for p in held if p not in names]:
            raise ValueError(
                f"train_state: {len(foreign)} of the {len(held)} parameters that the optimizer holds"
                f" (the first has shape {foreign[0]}) aren't the model's, so it trains nothing of it;"
                " build the optimizer after apply_tp and apply_fsdp2, from model.parameters()"
            )
        if len(held) != len(set(held)):
            raise ValueError("train_state: two optimizers hold the same parameter; give it to one")
        return names


def _options(group: Group) -> Group:
    return {option: value for option, value in group.items() if option != "params"}


def _set_options(group: Group, saved: Group) -> None:
    for option, value in saved.items():
        live = group.get(option)
        if option in IMPLEMENTATION and option in group:
            continue
        if isinstance(live, Tensor):
            if value is not live:
                live.copy_(
                    torch.as_tensor(value, device=live.device)
                )  # a compiled step reads this very tensor
        else:
            group[option] = value.item() if isinstance(value, Tensor) and option in group else value


def _parameter_of(path: str, names: dict[str, str]) -> str:
    """``"state.layers.0.wq.weight.exp_avg"`` -> ``"layers.0.wq.weight"``."""
    name = path.removeprefix("state.")
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def _saved_key(key: str, names: list[str], group_of: dict[str, str]) -> str | None:
    """Which saved group has the options of the live one: the one that its parameters were in.

    None if none of them was saved: a group of new parameters keeps its options. One without
    parameters (of a pipeline stage) is known by its number.
    """
    keys = sorted({group_of[name] for name in names if name in group_of})
    if len(keys) > 1:
        raise ValueError(
            f"load: group {key} of the optimizer holds parameters of the saved groups {keys}, whose"
            " options may differ; build the groups as they were when it was saved"
        )
    return keys[0] if keys else None if names else key


@torch.inference_mode(False)
def _new_state(spec: Spec, parameter: Tensor, group: Group) -> Tensor:
    """Memory for a state that the optimizer would make at its next step, laid out as it would."""
    if not spec.shape:  # the step: on CPU, unless the kernel counts it
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty((), dtype=spec.dtype, device=parameter.device if on_device else "cpu")
    with torch.no_grad():
        if spec.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
        if not isinstance(parameter, DTensor):
            return torch.empty(spec.shape, dtype=spec.dtype, device=parameter.device)
        # A factor of a moment, say [rows, 1]: split where it is as long as the parameter.
        placements = [
            p
            if isinstance(p, Shard)
            and spec.shape[p.dim : p.dim + 1] == parameter.shape[p.dim : p.dim + 1]
            else Replicate()
            for p in parameter.placements
        ]
        mesh, shape = parameter.device_mesh, torch.Size(spec.shape)
        local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(
            torch.empty(local, dtype=spec.dtype, device=parameter.to_local().device),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=whole.stride(),
        )
