"""Which memory an op reads, makes and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def memory_of(values: Any) -> set[int]:
    """What tells the memory of tensors, and of views of them, from that of others while they live."""
    return {memory for leaf in tree_leaves(values) for memory in _storages(leaf)}


def written_by(op: Any, args: Arguments, kwargs: Keywords) -> set[int]:
    """The memory of arguments that ``op`` changes in place, by its schema."""
    if not is_mutable(op):
        return set()
    names = [
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return memory_of([argument_of(op, name, args, kwargs) for name in names])


def is_mutable(op: Any) -> bool:
    schema = getattr(op, "_schema", None)  # higher-order ones have none
    return schema is not None and bool(schema.is_mutable)


def argument_of(op: Any, name: str, args: Arguments, kwargs: Keywords) -> Any:
    """The argument of that name, or its default; None: there is none."""
    schema = getattr(op, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            default = argument.default_value if argument.has_default_value() else None
            return args[place] if place < len(args) else kwargs.get(name, default)
    return None


class WrittenInputs:
    """Watches the ops of a unit for a change in place of what it was given, not made itself.

    Compiled code makes such changes at the end of the forward. What its backward computes again
    from that input, before or after the change, starts from the changed one.
    """

    def __init__(self) -> None:
        self.made: set[int] = set()
        self.uses: dict[int, int] = {}  # of memory not made here: by how many ops
        self.written: set[int] = set()

    def note(self, op: Any, args: Arguments, kwargs: Keywords, output: Any) -> bool:
        """Whether after this op an input is both changed and of use to another op."""
        read = memory_of((args, kwargs)) - self.made
        for memory in () if _is_view(op) else read:
            self.uses[memory] = self.uses.get(memory, 0) + 1
        self.made |= memory_of(output) - read
        written = written_by(op, args, kwargs) - self.made
        self.written |= written
        # The result of batch_norm doesn't depend on the statistics it changes.
        if written and "batch_norm" not in op.name() and _has_result(op):
            return True
        return any(self.uses[memory] > 1 for memory in self.written)


def _is_view(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and all(result.alias_info is not None for result in schema.returns)
    )


def _has_result(op: Any) -> bool:
    return any(result.alias_info is None for result in op._schema.returns)


def _storages(value: Any) -> Iterator[int]:
    # torch puts what it saves into a wrapper.
    tensor = value if isinstance(value, Tensor) else getattr(value, "val", None)
    if isinstance(tensor, FunctionalTensor):  # while compiling
        tensor = tensor.elem
    if not isinstance(tensor, Tensor):
        return
    inner: Any = tensor
    if is_traceable_wrapper_subclass(inner):
        for name in inner.__tensor_flatten__()[0]:
            yield from _storages(getattr(inner, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()._cdata
