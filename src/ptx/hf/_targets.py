"""The tensors of a model that a checkpoint holds: parameters, and buffers that are saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ptx._names import clean_name
from ptx.hf._names import keys_for, tied_elsewhere
from ptx.parallel._init_draw import shard_problem


@dataclass(eq=False)
class Target:
    """One tensor of a model; a tied one has several names, and one key for each.

    Args:
        name: Its first clean name.
        keys: Where a file may have it, best first; the first is where it is written.
        tensor: The parameter or buffer, in its global shape.
        is_vocabulary: Whether its rows are tokens.
    """

    name: str
    keys: list[str]
    tensor: Tensor
    is_vocabulary: bool


def parts_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """The model, or the parts of it that this rank has."""
    return [model] if isinstance(model, nn.Module) else list(model)


def targets_of(part: nn.Module) -> list[Target]:
    """Every tensor of a part once, in the model's order.

    Those that its state_dict has, by which FSDP shows its shards: in ``parameters()`` there may be
    gathered copies, to which writes are lost.
    """
    vocabulary = _vocabulary(part)
    targets: dict[int, Target] = {}
    for raw_name, tensor in part.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # what modules add by get_extra_state
            continue
        name = clean_name(raw_name)
        elsewhere = tied_elsewhere(part, name)
        keys = keys_for(part, name) if elsewhere is None else [elsewhere]
        target = targets.setdefault(id(tensor), Target(name, [], tensor, id(tensor) in vocabulary))
        target.keys += [key for key in keys if key not in target.keys]
    return list(targets.values())


def misplaced(targets: list[Target]) -> list[str]:
    """Tensors of which this rank doesn't hold one box."""
    problems = ((target.name, shard_problem(target.tensor)) for target in targets)
    return [f"{name}: {problem}" for name, problem in problems if problem]


def _vocabulary(part: nn.Module) -> set[int]:
    ends = [getattr(part, name, None) for name in ("tok_embeddings", "output")]
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if callable(find := getattr(part, getter, None)):
            ends.append(find())
    return {
        id(parameter)
        for end in ends
        if isinstance(end, nn.Module)
        for parameter in end.parameters(recurse=False)
    }
