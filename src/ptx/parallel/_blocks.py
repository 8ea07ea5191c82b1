"""Find a model's repeated blocks, and turn unit names and globs into groups of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from ptx._names import clean_name, clean_named_modules, match_names

# Names or globs, each match a unit; a nested list is one unit: ["layers.*", ["norm", "output"]].
Units = Sequence[str | Sequence[str]]


def find_blocks(model: nn.Module) -> list[str]:
    """The names of a model's repeated blocks: the default units of every ``apply_*``.

    The rule: a *stack* is an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` in which a
    class of module with parametered submodules occurs at least twice, or a list or dict that holds
    one such module only. Its blocks are its children with parametered submodules. A stack inside a
    block of another doesn't count: of a model with stages of blocks the stages are found, and the
    experts of a block never are. Stacks in different modules (encoder and decoder, vision and text
    tower) are all taken; stacks side by side in one module only if they have a class in common, as
    the stages of a ResNet do.

    Args:
        model: Any module; wrapped, sharded or on the meta device too.

    Returns:
        Names in module order, without wrapper prefixes: ``["layers.0", "layers.1", ...]``.

    Raises:
        ValueError: There is no stack, or it isn't clear which: stacks of unrelated classes side by
            side, or stacks inside a list of unrelated modules. The message lists the candidates.

    Cost: a walk over the modules.
    """
    stacks: dict[str, list[str]] = {}
    mixed: dict[str, list[str]] = {}  # lists of blocks that are no stack, as no class occurs twice
    modules = dict(clean_named_modules(model))
    for name, module in modules.items():  # outer modules come first
        inner = _unwrap(module)
        if not isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        if any(is_inside(name, block) for blocks in stacks.values() for block in blocks):
            continue
        kinds = {_join(name, key): _kind(child) for key, child in inner.named_children()}
        counts = Counter(kind for kind in kinds.values() if kind)
        blocks = [block for block, kind in kinds.items() if kind]
        alone = len(kinds) == 1 and not isinstance(inner, nn.Sequential)
        if blocks and (alone or max(counts.values()) > 1):
            stacks[name] = blocks
        elif len(blocks) > 1 and not isinstance(inner, nn.Sequential):
            mixed[name] = blocks
    where, what = "find_blocks", type(model).__name__
    if not stacks:
        seen = f"; {_describe(mixed, modules)} don't repeat a class" if mixed else ""
        raise ValueError(
            f"{where}: {what} has no list of repeated blocks (an nn.ModuleList, ModuleDict or"
            f" Sequential of modules of one class){seen}; name them: units=['encoder.*'], or"
            " units=[] for none"
        )
    inside_mixed = {
        name: blocks for name, blocks in mixed.items() if any(is_inside(s, name) for s in stacks)
    }
    if inside_mixed or not _alike_where_adjacent(stacks, modules):
        raise ValueError(
            f"{where}: it isn't clear which modules of {what} are its blocks:"
            f" {_describe({**inside_mixed, **stacks}, modules)}; name them:"
            f" units={[_join(name, '*') for name in inside_mixed or stacks]}"
        )
    found = {block for blocks in stacks.values() for block in blocks}
    return [name for name in modules if name in found]


def resolve_units(model: nn.Module, units: Units | None, *, where: str) -> list[list[str]]:
    """The groups of module names that ``units`` stands for, in the order given.

    Args:
        model: The module whose submodules are named.
        units: Names or globs, each match a group; a nested list is one group. None: `find_blocks`,
            each block a group.
        where: Who asks, for the errors: ``"apply_fsdp2"``.

    Raises:
        ValueError: A unit that matches nothing, a module named twice or inside another one of its
            own group, a list of modules (which is never called itself), an empty group; all of
            them in one message.
    """
    if units is None:
        return [[name] for name in find_blocks(model)]
    if isinstance(units, str):
        raise ValueError(
            f"{where}: units must be a list of names, got {units!r}; write [{units!r}]"
        )
    if isinstance(units, nn.Module) or not isinstance(units, Iterable):
        got = type(units).__name__
        raise ValueError(f"{where}: units must be a list of names, got {got}; see find_blocks")
    modules = {name: module for name, module in clean_named_modules(model) if name}
    groups: list[list[str]] = []
    named_by: dict[str, str] = {}
    wrong: list[str] = []
    for unit in units:
        patterns = list(unit) if isinstance(unit, list | tuple) else [unit]
        if not patterns:
            wrong.append("an empty list is no unit")
        group: list[str] = []
        for pattern in patterns:
            if not isinstance(pattern, str):
                wrong.append(_not_a_name(pattern, modules))
                continue
            try:
                names = match_names(pattern, modules, where=where)
            except ValueError as error:
                wrong.append(str(error).removeprefix(f"{where}: "))
                continue
            for name in names:
                if name in named_by:
                    by = " and ".join(map(repr, dict.fromkeys((named_by[name], pattern))))
                    wrong.append(f"{name!r} is named twice, by {by}")
                elif is_container(modules[name]):
                    kind, children = type(modules[name]).__name__, _join(name, "*")
                    holds = next(modules[name].children(), None) is not None
                    fix = f"write {children!r}" if holds else "name the module that uses it"
                    wrong.append(f"{name!r} is a {kind}, never called itself; {fix}")
                else:
                    named_by[name] = pattern
                    group.append(name)
        for name in group:
            if outer := next((o for o in group if o != name and is_inside(name, o)), None):
                wrong.append(f"{name!r} is inside {outer!r} of the same unit; leave it out")
        groups += [[name] for name in group] if isinstance(unit, str) else [group]
    if wrong:
        raise ValueError(f"{where}: " + "; ".join(wrong))
    return groups


def is_inside(name: str, outer: str) -> bool:
    """Whether ``name`` is ``outer`` or a module in it."""
    return not outer or name == outer or name.startswith(outer + ".")


def is_container(module: nn.Module) -> bool:
    """Whether the module only holds others and is never called, so no hook on it would run."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        and type(module).forward is nn.Module.forward
    )


def _not_a_name(unit: object, modules: dict[str, nn.Module]) -> str:
    name = next((name for name, module in modules.items() if module is unit), None)
    fix = f"write {name!r}" if name else "pass the names of submodules"
    return f"units are names, not {type(unit).__name__}; {fix}"


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """The class a block is known by, or None for what can't be a block: a single layer, or a list."""
    module = _unwrap(module)
    own = set(module.parameters(recurse=False))
    parametered = any(parameter not in own for parameter in module.parameters())
    return type(module) if parametered and not is_container(module) else None


def _unwrap(module: nn.Module) -> nn.Module:
    while True:
        children = list(module.named_children())
        if len(children) != 1 or clean_name(children[0][0]):
            return module
        module = children[0][1]


def _alike_where_adjacent(stacks: dict[str, list[str]], modules: dict[str, nn.Module]) -> bool:
    common: dict[str, set[type | None]] = {}  # by parent module
    for name, blocks in stacks.items():
        parent = name.rpartition(".")[0]
        kinds = {_kind(modules[block]) for block in blocks}
        common[parent] = common.get(parent, kinds) & kinds
    return all(common.values())


def _describe(lists: dict[str, list[str]], modules: dict[str, nn.Module]) -> str:
    return ", ".join(
        f"{_join(name, '*')!r} ({_contents(blocks, modules)})" for name, blocks in lists.items()
    )


def _contents(blocks: list[str], modules: dict[str, nn.Module]) -> str:
    kinds = Counter(type(_unwrap(modules[block])).__name__ for block in blocks)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
