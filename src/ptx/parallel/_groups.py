"""Decide which modules share an FSDP group: units, embedding, head, ties, and a root for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ptx._names import clean_name, clean_named_modules, match_names
from ptx.parallel._blocks import Units, is_container, resolve_units


@dataclass(eq=False)
class Group:
    """Modules whose parameters are gathered and reduced together."""

    names: list[str]
    asked: bool  # by `units`; else made for embedding or head, and may be left to the root


@dataclass
class Grouping:
    """What to wrap, inner groups first; the module called ``root`` takes the rest."""

    groups: list[Group]
    root: str
    head: str | None
    head_group: Group | None  # None although there is a head: it lies in the root


def plan_groups(
    model: nn.Module, units: Units | None, head: str | nn.Module | None, *, where: str
) -> Grouping:
    """The groups of `apply_fsdp2`, whose docstring gives the rules; changes nothing.

    Raises:
        ValueError: As `resolve_units`; a head that isn't there; units without parameters, or that
            can't be nested; tied parameters that can't be in one group.
    """
    tree = _Tree(model)
    groups = [Group(names, asked=True) for names in resolve_units(model, units, where=where)]
    wrong = _drop_bare(groups, tree)
    head_name = _find_head(model, tree, head, where)
    embedding = _find_embedding(model, tree) if units is None else None
    for name in (embedding, head_name):
        if name and tree.home(name, groups) is None:
            groups.append(Group([name], asked=False))
    wrong += _join_tied(groups, tree)
    groups, unordered = _inner_first(groups, tree)
    wrong += unordered
    if wrong:
        raise ValueError(f"{where}: " + "; ".join(wrong))
    head_group = tree.home(head_name, groups) if head_name is not None else None
    root = _find_root(head_name, groups, tree) if head_name and head_group else ""
    return Grouping(groups, root, head_name, head_group)


class _Tree:
    """A module tree by clean names, in which a module that is reached by several paths is one."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(clean_named_modules(model))  # by the first path to each
        self.first_name: dict[str, str] = {}  # by every path
        self.owners: dict[nn.Parameter, list[str]] = {}  # all paths to modules that hold it
        self._name_of: dict[nn.Module, str] = {}
        self._under: dict[str, set[nn.Module]] = {}
        for raw_path, module in model.named_modules(remove_duplicate=False):
            path = clean_name(raw_path)
            # A wrapper and the module in it have one clean name: the wrapper's, hooks go there.
            name = self._name_of.setdefault(module, path)
            self.first_name.setdefault(path, name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(parameter, []).append(path)

    def name_of(self, module: object) -> str | None:
        return self._name_of.get(module) if isinstance(module, nn.Module) else None

    def is_bare(self, name: str) -> bool:
        return next(self.modules[name].parameters(), None) is None

    def can_be_called(self, name: str) -> bool:
        """Whether hooks on it would run, and have parameters to gather."""
        return not self.is_bare(name) and not is_container(self.modules[name])

    def is_inside(self, name: str, outer: str) -> bool:
        """Whether the one module is in the other, by any path, and isn't it."""
        if outer not in self._under:
            self._under[outer] = set(self.modules[outer].modules())
        return name != outer and self.modules[name] in self._under[outer]

    def home(self, path: str, groups: list[Group]) -> Group | None:
        """The group that takes what the module at ``path`` holds; None: the root."""
        group_of = {name: group for group in groups for name in group.names}
        for outer in _path_and_parents(path):
            if group := group_of.get(self.first_name[outer]):
                return group
        return None


def _path_and_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _drop_bare(groups: list[Group], tree: _Tree) -> list[str]:
    """Leave out modules without parameters, which a glob may well catch."""
    named = [name for group in groups for name in group.names]
    for group in groups:
        group.names = [name for name in group.names if not tree.is_bare(name)]
    groups[:] = [group for group in groups if group.names]
    return [f"none of the units {named} has parameters"] if named and not groups else []


def _find_head(
    model: nn.Module, tree: _Tree, head: str | nn.Module | None, where: str
) -> str | None:
    if head is None:
        getter = getattr(model, "get_output_embeddings", None)
        found = getter() if callable(getter) else None
        name = tree.name_of(found if found is not None else getattr(model, "output", None))
        return name if name is not None and tree.can_be_called(name) else None
    name = tree.first_name.get(head) if isinstance(head, str) else tree.name_of(head)
    if name is not None and tree.can_be_called(name):
        return name
    what = repr(head) if isinstance(head, str) else type(head).__name__
    names = [name for name in tree.modules if name and tree.can_be_called(name)]
    if isinstance(head, str) and name is None:
        names = match_names(head, names, where=f"{where}: head")
        raise ValueError(f"{where}: head={what} must be one name; did you mean {names[0]!r}?")
    if name is None:
        wrong = f"no submodule of {type(model).__name__}; pass one, or its name"
    elif tree.is_bare(name):
        wrong = f"a {type(tree.modules[name]).__name__} without parameters; leave it out"
    else:
        wrong = f"a {type(tree.modules[name]).__name__}, never called itself; pass a module in it"
    raise ValueError(f"{where}: head={what} is {wrong}")


def _find_embedding(model: nn.Module, tree: _Tree) -> str | None:
    getter = getattr(model, "get_input_embeddings", None)
    try:
        embedding = getter() if callable(getter) else getattr(model, "tok_embeddings", None)
    except NotImplementedError:  # what transformers models without tokens answer
        return None
    return tree.name_of(embedding) if isinstance(embedding, nn.Embedding) else None


def _join_tied(groups: list[Group], tree: _Tree) -> list[str]:
    """Put all owners of a shared parameter into one group; returns what can't be done."""
    shared = [paths for paths in tree.owners.values() if len(paths) > 1]
    while True:  # a module that joins a group can bring another shared parameter along
        before = [list(group.names) for group in groups]
        wrong = [error for paths in shared if (error := _join_owners(paths, groups, tree))]
        if wrong or before == [group.names for group in groups]:
            return wrong


def _join_owners(paths: list[str], groups: list[Group], tree: _Tree) -> str | None:
    homes = [tree.home(path, groups) for path in paths]
    apart = [group for group in groups if group in homes]
    if len(apart) + (None in homes) < 2:
        return None
    quoted = ", ".join(repr(path) for path in paths)
    error = (
        f"{quoted} share a parameter but can't be in one group; name a unit that holds them all, or"
        " none of them"
    )
    loose = {tree.first_name[path] for path, home in zip(paths, homes) if home is None}
    others = [name for group in groups if group not in apart for name in group.names]
    if (
        any(
            is_container(tree.modules[name]) or any(tree.is_inside(other, name) for other in others)
            for name in loose
            if name
        )
        or "" in loose
    ):
        # Held by the root, by a list, or by a module with other groups in it: can't be a member.
        if any(group.asked for group in apart):
            return error
        groups[:] = [group for group in groups if group not in apart]
        return None
    members = list(dict.fromkeys([name for group in apart for name in group.names] + sorted(loose)))
    inner = {a for a in members if any(tree.is_inside(a, b) for b in members)}
    if any(tree.is_inside(a, b) for a in inner for b in members if b not in loose):
        return error
    joined = Group(
        [name for name in members if name not in inner], any(group.asked for group in apart)
    )
    groups[:] = [
        joined if group is apart[0] else group for group in groups if group not in apart[1:]
    ]
    return None


def _inner_first(groups: list[Group], tree: _Tree) -> tuple[list[Group], list[str]]:
    """``fully_shard`` takes every parameter that no earlier call took, so inner groups go first."""
    ordered: list[Group] = []
    left = list(groups)
    while left:
        free = next((g for g in left if not any(_holds(g, other, tree) for other in left)), None)
        if free is None:
            units = ", ".join(str(group.names) for group in left)
            return groups, [
                f"units {units} lie inside each other, so none can be wrapped first; split them"
            ]
        ordered.append(free)
        left.remove(free)
    return ordered, []


def _holds(group: Group, other: Group, tree: _Tree) -> bool:
    return group is not other and any(
        tree.is_inside(a, b) for a in other.names for b in group.names
    )


def _find_root(head: str, groups: list[Group], tree: _Tree) -> str:
    """The model; or, if the head lies outside the module that holds all the rest, that module.

    The root's parameters are gathered only when the root itself is called. With a transformers
    CausalLM as root, calling ``model.model(tokens)`` and ``model.lm_head(hidden)`` would miss that.
    """
    rest = [name for group in groups for name in group.names if name != head]
    rest += [
        path for paths in tree.owners.values() for path in paths if tree.home(path, groups) is None
    ]
    base = _common_parent(rest)
    while base and is_container(tree.modules[tree.first_name[base]]):
        base = base.rpartition(".")[0]
    base = tree.first_name[base] if base else ""
    return base if base and head != base and not tree.is_inside(head, base) else ""


def _common_parent(paths: list[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths)):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
