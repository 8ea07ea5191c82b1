"""A loss whose head FSDP gathers runs outside of its caller's compiled code: one break, not a handful."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

# Private: torch.compiler.disable, the public form, imports dynamo at once, with ptx.
from torch._compile import _disable_dynamo

from ptx.loss._head import gathers

P = ParamSpec("P")
R = TypeVar("R")


def eager_if_gathered(loss: Callable[P, R]) -> Callable[P, R]:
    """``loss(hidden, head, ...)``, which a compiled caller calls as it is if FSDP has to gather ``head``.

    FSDP's hooks can't be compiled, so the graph would break around each of them, in every function
    on the way there.
    """
    outside = _disable_dynamo(loss)

    @functools.wraps(loss)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        head = args[1] if len(args) > 1 else kwargs.get("head")
        if torch.compiler.is_compiling() and gathers(head):
            result: R = outside(*args, **kwargs)
            return result
        return loss(*args, **kwargs)

    return call
