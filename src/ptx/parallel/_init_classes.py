"""Show an initialisation the classes that the model's author wrote, not those that wrap them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

_TP_STYLES = "ptx.parallel._tp_styles"


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Undo, inside, the changes of modules' classes by fully_shard and apply_tp.

    Initialisations ask for classes in ways that a subclass fails: ``type(m) is nn.Linear``,
    ``type(m).__name__``; transformers takes a class of another package for custom code, and then
    leaves out modules without parameters of their own, where T5 and CLIP have their formulas.
    """
    wrapped = {m: type(m) for m in model.modules() if _original(type(m)) is not type(m)}
    try:
        for module, kind in wrapped.items():
            module.__class__ = _original(kind)
        yield
    finally:
        for module, kind in wrapped.items():
            module.__class__ = kind


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    while _is_fsdps(kind) or _is_tps(kind):
        kind = kind.__bases__[-1]
    return kind


def _is_fsdps(kind: type[nn.Module]) -> bool:
    # (FSDPModule, the original); torch's replicate has a subclass of FSDPModule. By the module as
    # well, since a user may write such a class, for the methods.
    bases = kind.__bases__
    made = len(bases) == 2 and issubclass(bases[0], FSDPModule) and issubclass(bases[1], nn.Module)
    return made and kind.__module__.startswith("torch.distributed.")


def _is_tps(kind: type[nn.Module]) -> bool:
    # Replicated's classes have the name of the original, and change attribute access alone. A
    # notebook's `class Model(Model)` has the same name too, but more in it.
    base = kind.__bases__[-1]
    same = (kind.__module__, kind.__qualname__) == (base.__module__, base.__qualname__)
    alike = same and "__getattr__" in vars(kind) and not _methods(kind) - {"__getattr__"}
    return issubclass(base, nn.Module) and (alike or kind.__module__ == _TP_STYLES)


def _methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value)}
