"""Put recomputation and compilation around a module's forward, always in the order that works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import nn

from ptx._names import clean_named_modules
from ptx.parallel._blocks import Units, is_inside, resolve_units
from ptx.parallel._order import NESTING_KEY, is_tp, require_before

Forward = Callable[..., Any]  # takes the module first
Layer = Callable[[Forward], Forward]

# Where a forward is kept that somebody put on the instance before us: with the module it is copied
# as it would be without layers.
_OWN_FORWARD_KEY = "_ptx_own_forward"


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
        forward.__name__ = "forward"  # by which a pickled module finds its class's, without layers
        return forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Nesting:
        """Nothing here belongs to a module, and a policy may refer to anything."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as None: layers are of the process, a model is loaded without them."""
        return type(None), ()


def nesting_of(module: nn.Module) -> Nesting | None:
    """What `add_layer` put around the module's forward; None: nothing."""
    nesting = module.__dict__.get(NESTING_KEY)
    assert nesting is None or isinstance(nesting, Nesting)
    return nesting


def add_layer(model: nn.Module, units: Units | None, *, where: str, **layer: Any) -> None:
    """Give each unit a layer more, around or inside of what it has.

    ``forward`` is replaced on the instance, so names and classes stay as they are, and a unit's
    hooks (FSDP's among them) run outside of all layers: once. As a bound method it is copied with
    its module; since all modules of a class bind the same code, they compile to one graph.

    Args:
        model: The module that holds the units.
        units: As for `resolve_units`; modules of a group are units of their own.
        where: Who asks, for the errors: ``"apply_ac"``.
        layer: Attributes of `Nesting`.

    Raises:
        ValueError: Too late, units that don't resolve, or all nestings that wouldn't work.
    """
    require_before(where, model, "apply_fsdp2")
    names = [name for group in resolve_units(model, units, where=where) for name in group]
    modules = dict(clean_named_modules(model))
    nestings = {n: nesting for n, m in modules.items() if (nesting := nesting_of(m)) is not None}
    wrong = []
    for name in names:
        old = nestings.get(name) or Nesting(_plain_forward(modules[name]))
        nestings[name] = replace(old, **layer)
        for what, done in (("recompute", "checkpointed"), ("compile", "compiled")):
            if what in layer and getattr(old, what):
                wrong.append(f"{name!r} is {done} already")
    touched = ((i, o) for i, o in _nested_pairs(nestings) if i in names or o in names)
    tp = is_tp(model)
    for inner, outer in touched:
        if why := _misfit(nestings[inner], nestings[outer], tp):
            wrong.append(f"{inner!r} is inside {outer!r}: {why}")
    wrong += _clashes(names, modules, layer)
    if wrong:
        raise ValueError(f"{where}: " + "; ".join(wrong))
    for name in names:
        module, nesting = modules[name], nestings[name]
        if nesting.plain is _call_own and nesting_of(module) is None:
            setattr(module, _OWN_FORWARD_KEY, module.__dict__["forward"])
        setattr(module, NESTING_KEY, nesting)
        module.forward = MethodType(nesting.forward(), module)


def _clashes(
    units: list[str], modules: dict[str, nn.Module], layer: dict[str, Any]
) -> Iterator[str]:
    for name, module in modules.items():
        for done, by in _done_by_others(module):
            for unit in units:
                inside = is_inside(name, unit)
                if done in layer and (inside or is_inside(unit, name)):
                    yield f"{unit!r}: {name!r} is {by} already; leave out one of the two"
                elif done == "compile" and layer.get("by_op") and inside:
                    yield (
                        f"{unit!r}: {name!r} is {by}, and a policy doesn't see the ops of compiled"
                        " code; use apply_compile"
                    )


def _done_by_others(module: nn.Module) -> Iterator[tuple[str, str]]:
    if hasattr(module, "_checkpoint_wrapped_module"):
        yield "recompute", "recomputed by torch's checkpoint_wrapper"
    if getattr(module, "gradient_checkpointing", False) is True:
        yield "recompute", "recomputed by transformers"
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        yield "compile", "compiled by torch.compile"


def _plain_forward(module: nn.Module) -> Forward:
    own = module.__dict__.get("forward")
    plain = type(module).forward
    # A module that was pickled with layers has its class's forward as its own.
    return plain if own is None or getattr(own, "__func__", None) is plain else _call_own


def _call_own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.__dict__[_OWN_FORWARD_KEY](*args, **kwargs)


def _nested_pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((i, o) for i in names for o in names if i != o and is_inside(i, o))


def _misfit(inner: Nesting, outer: Nesting, tp: bool) -> str | None:
    if inner.recompute and outer.recompute:
        return "it would be recomputed twice; checkpoint one of them"
    if inner.compile and outer.compile:
        return "it would be compiled with it, its own options lost; compile one of them"
    if inner.compile and outer.by_op:
        return "a policy doesn't see the ops of compiled code; compile the outer one"
    if tp and inner.recompute and not inner.by_op and outer.compile:
        # torch 2.13, see _SavedOps.__call__ in _saved_ops.py.
        return (
            "under tensor parallelism compiled code can't recompute a part of itself; compile smaller"
            " units, or checkpoint the outer one"
        )
    return None
