"""Run a unit a second time from what it had the first time, and leave no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from ptx._names import clean_name
from ptx.parallel._generators import generator_of, generators_in

Forward = Callable[..., Any]  # takes the module first
Table = MutableMapping[Any, Any]

# Buffers up to this size are copied before each forward and put back to recompute it, whether or
# not they change: some kernels (batch_norm's) change them without a trace. The statistics of 16 Ki
# channels fit. Bytes.
_SMALL = 2**16
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()


class Rerun:
    """One call of a unit: the first time with what it was given, then as often as autograd asks.

    The second time everything is as it was at the start of the first: the containers and objects
    among its arguments, parameters, buffers and attributes of its modules, and generators it draws
    from. The changes that it makes are undone, so what the first made stays, once.

    Args:
        forward: Takes the module first.
        module: The unit.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        by_op: Whether a policy sees its ops. Then it is recomputed once at most, for which no copy of
            a buffer is made: the policy would take that for an op of the unit.
    """

    def __init__(
        self,
        forward: Forward,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        by_op: bool,
    ) -> None:
        self.forward, self.module, self.by_op = forward, module, by_op
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.inputs = [_Watched(leaf) for leaf in self.leaves]
        # Dicts that may change, and their contents; arguments that pytrees don't know come first.
        self.tables = [(w.table, w.contents) for w in self.inputs if w.table is not None]
        self.copies: dict[int, Tensor] = {}  # of small buffers, by their id
        self.fixed: list[Tensor] = []  # must not change
        self._note_state()
        self.versions = [tensor._version for tensor in self.fixed]
        generators = generators_in(module)
        generators += [generator_of(v) for v in self.leaves if isinstance(v, torch.Generator)]
        self.generators = [(generator, generator.get()) for generator in generators]

    def __call__(self, *leaves: Any) -> Any:
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            return self._run(args, kwargs)
        args, kwargs = tree_unflatten(leaves, self.spec)
        with self._as_before():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.by_op:
            # Casts of weights that autocast has from an earlier call are ops that the other run lacks.
            torch.clear_autocast_cache()
        return self.forward(self.module, *args, **kwargs)

    def finish(self) -> None:
        """After the first call: refuse what can't be recomputed, as long as nothing is wrong yet."""
        problems = [
            f"changed its argument {self._argument(number)} in place; change a copy of it"
            for number, watched in enumerate(self.inputs)
            if watched.changed()
        ]
        problems += [
            f"changed {name} in place; leave it out of the units, or change it outside of them"
            for name in self._changed()
        ]
        if problems:
            raise ValueError(
                f"apply_ac: a {type(self.module).__name__} can't be recomputed from what it was"
                f" given: it {'; it '.join(problems)}"
            )
        del self.inputs, self.leaves  # checkpoint holds them in its own way
        for table, then in self.tables:
            if not _same(table, then):
                # What an earlier call left is needed for its values, not for its graph.
                then.update({k: _cut(v) for k, v in then.items() if table.get(k) is not v})
        self.generators = [(g, state) for g, state in self.generators if g.get() != state]

    def _note_state(self) -> None:
        for module in self.module.modules():
            attributes = vars(module)
            self.tables.append((attributes, attributes.copy()))
            for value in attributes.values():
                if isinstance(value, Tensor) and value.grad_fn is None:
                    self._note_buffer(value)
            # FSDP exchanges its shards for whole parameters, and back, as it needs them.
            parameters = attributes.get("_parameters")
            if parameters and "_is_fsdp_managed_module" not in attributes:
                self.tables.append((parameters, parameters.copy()))
                self.fixed += [p for p in parameters.values() if p is not None and _counts(p)]
            buffers = attributes.get("_buffers")
            if buffers is not None:
                self.tables.append((buffers, buffers.copy()))
                for buffer in buffers.values():
                    self._note_buffer(buffer)

    def _note_buffer(self, buffer: Tensor | None) -> None:
        if buffer is None or id(buffer) in self.copies or not _counts(buffer):
            return
        dense = buffer.layout is torch.strided
        view = buffer._base is not None  # its copy would part from the rest
        if not dense or buffer.requires_grad or view or buffer.nbytes > _SMALL:
            self.fixed.append(buffer)
        else:
            self.copies[id(buffer)] = buffer.clone()

    def _changed(self) -> list[str]:
        versions = [tensor._version for tensor in self.fixed]
        if versions == self.versions:
            return []
        changed = {
            id(tensor)
            for tensor, version, before in zip(self.fixed, versions, self.versions)
            if version != before
        }
        names = [
            *(f"parameter {n!r}" for n, p in self.module.named_parameters() if id(p) in changed),
            *(_describe(n, b) for n, b in self.module.named_buffers() if id(b) in changed),
            *(
                f"attribute {clean_name(f'{name}.{key}'.lstrip('.'))!r}"
                for name, module in self.module.named_modules()
                for key, value in vars(module).items()
                if id(value) in changed
            ),
        ]
        return names or ["what was a parameter or buffer of it"]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        if changed := self._changed():
            raise ValueError(
                f"apply_ac: a {type(self.module).__name__} can't be recomputed: {', '.join(changed)}"
                " changed in place between its forward and its backward; run the backward before the"
                " optimizer's step, or change a copy"
            )
        now = [(t, then if _same(t, then) else dict(t)) for t, then in self.tables]
        states = [(generator, generator.get()) for generator, _ in self.generators]
        copies = self.copies if self.by_op else {i: c.clone() for i, c in self.copies.items()}
        try:
            for table, then in self.tables:
                if copies:
                    then = {key: copies.get(id(value), value) for key, value in then.items()}
                _set(table, then)
            for generator, state in self.generators:
                generator.set(state)
            yield
        finally:
            for table, contents in now:
                _set(table, contents)
            for generator, state in states:
                generator.set(state)

    def _argument(self, number: int) -> str:
        numbers = tree_unflatten([*range(self.spec.num_leaves)], self.spec)
        paths = {leaf: keystr(path) for path, leaf in tree_flatten_with_path(numbers)[0]}
        first, path = paths[number][:3], paths[number][3:]  # "[0]" of positional ones
        return ("args" if first == "[0]" else "kwargs") + path


class _Watched:
    """An argument, and how to see that it changed."""

    def __init__(self, value: Any) -> None:
        self.table: Table | None = None  # of an object that pytrees don't know
        if isinstance(value, MutableMapping):
            self.table = value
        elif not isinstance(value, (Tensor, *_SCALARS)) and not callable(value):
            self.table = getattr(value, "__dict__", None)
        self.contents = {} if self.table is None else dict(self.table)
        values = self.contents.values() if self.contents else [value]
        self.tensors = [v for v in values if isinstance(v, Tensor) and _counts(v)]
        self.versions = [tensor._version for tensor in self.tensors]

    def changed(self) -> bool:
        if [tensor._version for tensor in self.tensors] != self.versions:
            return True
        now = {} if self.table is None else self.table
        return any(now.get(key, _MISSING) is not value for key, value in self.contents.items())


def _counts(tensor: Tensor) -> bool:
    """Whether the tensor counts its changes."""
    return not (is_lazy(tensor) or tensor.is_inference())


def _describe(name: str, buffer: Tensor) -> str:
    size = "a view" if buffer._base is not None else f"{buffer.nbytes} bytes"
    return f"buffer {name!r} ({size})"


def _cut(value: Any) -> Any:
    def cut(leaf: Any) -> Any:
        history = isinstance(leaf, Tensor) and leaf.grad_fn is not None
        return leaf.detach().requires_grad_() if history else leaf

    return tree_map(cut, value)


def _same(table: Table, contents: dict[Any, Any]) -> bool:
    if len(table) != len(contents):
        return False
    return not table or all(map(is_, table.values(), contents.values()))


def _set(table: Table, contents: dict[Any, Any]) -> None:
    if _same(table, contents):
        return
    for key in table.keys() - contents.keys():
        del table[key]
    for key, value in contents.items():
        if table.get(key, _MISSING) is not value:
            table[key] = value
