"""Know which module's code an op belongs to, in the forward and in the backward."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ptx.flops._sharded import WHERE


class ModuleStack:
    """The modules that are being called, and where autograd's nodes were made.

    autograd numbers its nodes in the order it makes them, so the number at which each call begins
    and ends tells in which module a node was made, and its backward belongs there too.

    Args:
        names: Of modules by id; others belong to the one that calls them.
        originals: Ids of modules that must not run, as they are not those that were copied.

    Attributes:
        failure: The last error that ended a module's call, and the module's name.
    """

    def __init__(self, names: Mapping[int, str], originals: Set[int]) -> None:
        self.names, self.originals = names, originals
        self.thread = get_ident()  # hooks of all modules are called on all threads
        self.stack: list[tuple[int, str]] = []
        self.failure: tuple[BaseException, str] | None = None
        self.starts: list[int] = []  # numbers of nodes, ascending
        self.owners: list[str] = []  # who makes nodes from there on

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is entered, calls of modules are noted."""
        # Hooks of all modules, not of these: the modules' own hooks are theirs to look at.
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current(self) -> str:
        """The name of the module whose op is running."""
        if self.stack:
            return self.stack[-1][1]
        # Private; nothing public tells which node's backward is running.
        node = torch._C._current_autograd_node()
        if node is None or not self.starts:
            return ""
        return self.owners[max(0, bisect_right(self.starts, node._sequence_nr()) - 1)]

    def _enter(self, module: nn.Module, _: Any) -> None:
        if get_ident() != self.thread:
            return
        if id(module) in self.originals:
            raise ValueError(
                f"{WHERE}: {type(module).__name__} is called through an object that couldn't be copied"
                " with the model, with its real parameters; pass it as an argument, or make it a"
                " submodule"
            )
        name = self.names.get(id(module), self.stack[-1][1] if self.stack else "")
        self.stack.append((id(module), name))
        self._note(name)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if get_ident() != self.thread:
            return
        error = sys.exc_info()[1]  # a call that ends so reaches here too, the innermost first
        if error is not None and (self.failure is None or self.failure[0] is not error):
            self.failure = error, self.current()
        while self.stack and self.stack.pop()[0] != id(module):
            pass  # a call that an exception ended
        self._note(self.stack[-1][1] if self.stack else "")

    def _note(self, name: str) -> None:
        # The number that the next node will have; private, as the nodes' own.
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.owners.append(name)
