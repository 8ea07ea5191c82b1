"""A model's parameters and persistent buffers under the names its author gave, each tensor once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ptx._names import clean_name, clean_named_modules
from ptx.ckpt._parts import Part, Saved, Targets, new_like
from ptx.parallel._accumulate import _groups

EXTRA = "_extra_state"  # torch's own key for what get_extra_state returns


class ModelState(Part):
    """What `train_state` makes of a model: a Stateful whose tensors are the live ones.

    Args:
        parts: The model, or its parts on this rank; no name may occur in two.
    """

    split = True

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = list(parts)
        self.stateful = self
        named_tensors(self.parts)  # raises now, not at the first save

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers by clean name, tied ones once, and modules' extra state."""
        state, _ = self.read()
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Copy into the live tensors; what `state` doesn't have stays."""
        tensors, _ = named_tensors(self.parts)
        extras = self._extras()
        for key, value in state.items():
            if key in extras:
                extras[key][1](value)
            elif key in tensors and value is not tensors[key]:
                with torch.no_grad():
                    tensors[key].copy_(value)

    def read(self) -> tuple[Any, dict[str, Any]]:
        tensors, aliases = named_tensors(self.parts)
        extras = self._extras()
        state = {**tensors, **{name: get() for name, (get, _) in extras.items()}}
        return state, {"tied": tied(aliases), "extra": dict.fromkeys(extras, True)}

    def compared(self, names: Iterable[str]) -> list[str]:
        # Replicas of plain parameters are kept equal by training; hashing them all would cost more
        # than saving them. Buffers are few, and updated by each rank on its own data (BatchNorm).
        buffers = {clean_name(key) for part in self.parts for key, _ in part.named_buffers()}
        return [name for name in names if name in buffers]

    def targets(self, saved: Saved) -> Targets:
        require_notes(saved, "tied", "a model")
        tensors, aliases = named_tensors(self.parts)
        targets = Targets()
        for name, key in saved_names(aliases, saved.notes["tied"], saved.tensors).items():
            if key is None:
                targets.missing.append(name)
            else:
                targets.tensors[key] = tensors[name]
        extras = self._extras()
        for path, spec in saved.tensors.items():
            if any(path == key or path.startswith(key + ".") for key in extras):
                targets.tensors[path] = new_like(spec, None)
        targets.missing += [key for key in extras if key not in saved.notes["extra"]]
        targets.extras = [key for key in extras if key in saved.notes["extra"]]
        return targets

    def write(self, state: Any, saved: Saved) -> None:
        # The tensors are the live ones, and full by now; a tied one may go by another name here.
        extras = self._extras()
        self.load_state_dict({key: value for key, value in state.items() if key in extras})

    def _extras(self) -> dict[str, Any]:
        """(getter, setter) of each module with a state beyond its tensors."""
        return {
            f"{name}.{EXTRA}" if name else EXTRA: (module.get_extra_state, module.set_extra_state)
            for part in self.parts
            for name, module in clean_named_modules(part)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }


def named_tensors(parts: Sequence[nn.Module]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Parameters and persistent buffers by their first clean name, and the other names of each.

    FSDP's gathered copies are freed first, as its own state_dict does: of what they hide the shards
    are saved, and written.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    owner: dict[str, int] = {}
    for i, part in enumerate(parts):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                for group in _groups(module):
                    group._to_sharded()
        for prefix, module in part.named_modules(remove_duplicate=False):
            passing = module._non_persistent_buffers_set  # private, but what state_dict() reads
            own = [*module._parameters.items(), *module._buffers.items()]
            for key, tensor in own:
                if tensor is None or key in passing:
                    continue
                name = clean_name(f"{prefix}.{key}" if prefix else key)
                if owner.setdefault(name, i) != i:
                    raise ValueError(
                        f"train_state: {name!r} is in two parts of the model; parts need names of"
                        " their own"
                    )
                if id(tensor) not in first:
                    first[id(tensor)] = name
                    tensors[name] = tensor
                    aliases[name] = []
                elif name != first[id(tensor)] and name not in aliases[first[id(tensor)]]:
                    aliases[first[id(tensor)]].append(name)
    return tensors, aliases


def require_notes(saved: Saved, note: str, what: str) -> None:
    if note not in saved.notes:
        raise ValueError(f"load: it wasn't saved as {what}, which is what is here")


def tied(aliases: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: others for name, others in aliases.items() if others}


def saved_names(
    aliases: Mapping[str, list[str]], saved_ties: Mapping[str, list[str]], saved: Container[str]
) -> dict[str, str | None]:
    """What each tensor is called in a checkpoint; None if it isn't in there.

    Of a tied tensor the first name counts, and another order of modules makes another one the first.
    One that isn't tied here is not taken from a tied one: it would have the weight, but no moments.

    Args:
        aliases: The other names of each tensor.
        saved_ties: The same, of those that were tied when they were saved.
        saved: The names that the checkpoint has.
    """
    first = {alias: name for name, others in saved_ties.items() for alias in others}
    found: dict[str, str | None] = {}
    for name, others in aliases.items():
        names = [name, *others]
        by_tie = [first[alias] for alias in names if alias in first] if others else []
        found[name] = next((key for key in [*names, *by_tie] if key in saved), None)
    return found
