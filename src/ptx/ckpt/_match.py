"""Pair what is to be loaded with what was saved, and refuse what doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ptx._names import match_names
from ptx.ckpt._encode import decode
from ptx.ckpt._layout import mesh_of
from ptx.ckpt._parts import Part, Saved
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._step import Step

SHOWN = 8  # names of a kind in an error


@dataclass(frozen=True)
class Options:
    """What `load` lets pass."""

    allow_missing: Sequence[str]
    allow_unexpected: Sequence[str]
    allow_cast: bool


@dataclass
class Match:
    """One key to load: where its tensors go, by full saved name, and what it is written from."""

    key: str
    part: Part
    saved: Saved
    targets: dict[str, Tensor]
    tree: Any
    prefix: str  # of the names of its tensors
    on_other_mesh: bool = False

    def write(self, step: int) -> str | None:
        """Hand over the state; returns what to report."""
        state = decode(self.tree, self.prefix, self.targets)
        if self.on_other_mesh:
            return self.part.on_other_mesh(state, step)
        self.part.write(state, self.saved)
        return None


@dataclass
class _Found:
    matches: list[Match] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def match(step: Step, parts: Mapping[str, Part], ranks: Ranks, options: Options) -> list[Match]:
    """Pair the keys and tensors to load with those saved; changes nothing.

    Raises:
        ValueError: Whatever doesn't fit, all of it in one message. On all ranks.

    Cost: memory for optimizer states that don't exist yet; one all-reduce of an integer per name.
    """
    error: Exception | None = None
    found = _Found()
    try:
        found = _pair(step, parts, ranks, options)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    # What one rank doesn't take another may, as with pipeline stages.
    names = [*step.tensors, *step.extras]
    counts = ranks.start_max([int(name in found.taken) for name in names]).result()
    own_ranks = {f"{key}.{rank}" for key in step.own for rank in range(step.world_size)}
    unexpected = [
        name
        for name, count in zip(names, counts)
        if not count and name.partition(".")[0] in parts and not _is_under(name, own_ranks)
    ]
    try:
        _refuse(step, found, unexpected, options)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    return found.matches


def _pair(step: Step, parts: Mapping[str, Part], ranks: Ranks, options: Options) -> _Found:
    found = _Found()
    # Parts with an own state of each rank come last: the others tell which mesh this is.
    for key, part in sorted(parts.items(), key=lambda item: item[1].per_rank):
        if key not in step.keys:
            found.missing.append(key)
            continue
        if part.per_rank != (key in step.own):
            kinds = ["equal on all ranks", "its own on each rank (PerRank)"]
            found.wrong.append(
                f"{key!r} is {kinds[key in step.own]} in it, and {kinds[part.per_rank]} here"
            )
            continue
        same = not part.per_rank or _is_same_mesh(step, found.matches, ranks)
        if not same and not part.derives:
            if _without([key], options.allow_missing, [*step.keys, *parts], "allow_missing"):
                found.wrong.append(
                    f"{key!r} differs by rank and was saved on another mesh (allow_missing=[{key!r}]"
                    " leaves it as it is)"
                )
            continue
        source = ranks.rank if same else 0
        prefix = f"{key}.{source}" if part.per_rank else key
        tree, notes = step.trees(key, source)
        dot = prefix + "."
        specs = {n.removeprefix(dot): s for n, s in step.tensors.items() if n.startswith(dot)}
        saved = Saved(specs, notes)
        try:
            targets = part.targets(saved)
        except ValueError as problem:
            raise ValueError(
                f"load: {key!r} of {step.folder}: {str(problem).removeprefix('load: ')}"
            ) from None
        by_name = {dot + name: tensor for name, tensor in targets.tensors.items()}
        found.missing += [dot + name for name in targets.missing]
        found.taken |= {*by_name, *(dot + name for name in targets.extras)}
        found.matches.append(Match(key, part, saved, by_name, tree, prefix, not same))
    return found


def _is_same_mesh(step: Step, matches: list[Match], ranks: Ranks) -> bool:
    here = mesh_of(t for each in matches for t in each.targets.values())
    if ranks.size != step.world_size:
        return False
    return not here or here == step.manifest["meshes"][ranks.rank]


def _refuse(step: Step, found: _Found, unexpected: list[str], options: Options) -> None:
    wrong = [*found.wrong, *_tensor_problems(step, found.matches, options.allow_cast)]
    known = [*step.tensors, *step.extras, *step.keys, *found.missing]
    if missing := _without(found.missing, options.allow_missing, known, "allow_missing"):
        wrong.append(
            f"the checkpoint lacks {_listed(missing)} (allow_missing=[...] leaves them as they are)"
        )
    if unexpected := _without(unexpected, options.allow_unexpected, known, "allow_unexpected"):
        wrong.append(
            f"nothing here takes {_listed(unexpected)} (allow_unexpected=[...] skips them)"
        )
    if wrong:
        raise ValueError(f"load: {step.folder}: " + "; ".join(wrong))


def _tensor_problems(step: Step, matches: list[Match], allow_cast: bool) -> list[str]:
    wrong, cast, meta = [], [], []
    for each in matches:
        for name, tensor in each.targets.items():
            spec = step.tensors[name]
            if tensor.is_meta:
                meta.append(name)
            if any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
                wrong.append(f"{name!r} is expanded here, with values that share memory; clone it")
            if tuple(tensor.shape) != spec.shape:
                wrong.append(f"{name!r} has shape {spec.shape} in it, {tuple(tensor.shape)} here")
            elif tensor.dtype != spec.dtype and not allow_cast:
                cast.append(f"{name!r} ({spec.dtype} in it, {tensor.dtype} here)")
    if meta:
        wrong.append(
            f"{_listed(meta)} on meta, with no memory to load into; call"
            " materialize(model, device, seed=None) first"
        )
    if cast:
        more = f" and {len(cast) - SHOWN} more" if cast[SHOWN:] else ""
        wrong.append(f"{', '.join(cast[:SHOWN])}{more} would be cast (allow_cast=True does)")
    return wrong


def _without(names: list[str], globs: Sequence[str], known: list[str], option: str) -> list[str]:
    """The names that no glob matches, nor one of their dotted prefixes; a glob must match something."""
    if isinstance(globs, str):
        raise ValueError(f"load: {option} must be a list of names; write [{globs!r}]")
    if not globs:
        return names
    prefixes = {".".join(n.split(".")[:i]) for n in known for i in range(1, n.count(".") + 2)}
    allowed = {name for glob in globs for name in match_names(glob, sorted(prefixes), where="load")}
    return [
        name
        for name in names
        if not any(".".join(name.split(".")[:i]) in allowed for i in range(1, name.count(".") + 2))
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _is_under(name: str, prefixes: set[str]) -> bool:
    return ".".join(name.split(".")[:2]) in prefixes
