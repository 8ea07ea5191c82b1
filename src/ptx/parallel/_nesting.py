"""Put recomputation and compilation around a module's forward, always in the order that works."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import nn

from ptx._names import clean_named_modules
from ptx.parallel._blocks import is_inside

Forward = Callable[..., Any]  # takes the module first
Layer = Callable[[Forward], Forward]

_KEY = "_ptx_nesting"


@dataclass(frozen=True)
class Nesting:
    """What surrounds a module's forward; kept on the module, where later steps read it.

    Attributes:
        plain: The forward without any layer.
        recompute: Checkpoints a forward.
        by_op: Whether ``recompute`` looks at single ops. Then it must see them before they are
            compiled; else it stays around what is compiled, as inside it fails on DTensors.
        compile: Compiles a forward.
    """

    plain: Forward
    recompute: Layer | None = None
    by_op: bool = False
    compile: Layer | None = None

    def forward(self) -> Forward:
        """The plain forward with its layers."""
        layers = [self.compile, self.recompute]  # the inner one first
        if self.by_op:
            layers.reverse()
        forward = self.plain
        for layer in layers:
            if layer is not None:
                forward = layer(forward)
        return forward


def nesting_of(module: nn.Module) -> Nesting | None:
    """What surrounds the module's forward; None: nothing of ours."""
    nesting = module.__dict__.get(_KEY)
    assert nesting is None or isinstance(nesting, Nesting)
    return nesting


def nest(module: nn.Module, **layer: Any) -> None:
    """Add a layer, given as the attributes of `Nesting`, around or inside of what is there.

    ``forward`` is replaced on the instance, so names and classes stay as they are, and the module's
    hooks (FSDP's among them) run outside of all layers: once. As a bound method it is copied with
    its module; since all modules of a class bind the same code, they compile to one graph.
    """
    nesting = replace(nesting_of(module) or Nesting(_plain_forward(module)), **layer)
    setattr(module, _KEY, nesting)
    module.forward = MethodType(nesting.forward(), module)


def nested_modules(model: nn.Module) -> dict[str, Nesting]:
    """By name, every module that `nest` was called on."""
    found = ((name, nesting_of(module)) for name, module in clean_named_modules(model))
    return {name: nesting for name, nesting in found if nesting is not None}


def overlaps(units: list[str], others: Iterable[str], done: str) -> list[str]:
    """Complaints about units that are one of ``others``, or lie inside one another."""
    wrong = []
    for unit in units:
        for other in others:
            if unit == other:
                wrong.append(f"{unit!r} is {done} already")
            elif is_inside(unit, other) or is_inside(other, unit):
                inner, outer = sorted((unit, other), key=len, reverse=True)
                wrong.append(
                    f"{inner!r} is inside {outer!r}, and both would be {done}; leave one out"
                )
    for unit in units:
        wrong += [
            f"{unit!r} is inside {outer!r}, and both would be {done}; leave one out"
            for outer in units
            if unit != outer and is_inside(unit, outer)
        ]
    return wrong


def _plain_forward(module: nn.Module) -> Forward:
    own: Callable[..., Any] | None = module.__dict__.get("forward")
    return type(module).forward if own is None else functools.partial(_call_own, own)


def _call_own(own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)  # somebody replaced the instance's forward before
