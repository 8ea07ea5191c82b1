"""Read from a model which ptx steps it has been through, and refuse a step that comes too late."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# The one order in which the pieces compose (see docs); compile and checkpointing may come in either order.
NESTING_KEY = "_ptx_nesting"  # where apply_ac and apply_compile leave their mark on a module
ORDER = "apply_tp -> apply_ac / apply_compile -> apply_fsdp2 -> materialize -> optimizer"


def is_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_wrapped(model: nn.Module) -> bool:
    """Whether a part is checkpointed or compiled, by ptx or by torch (whose marks have no public name)."""
    return any(
        vars(module).get(NESTING_KEY) is not None  # None: it was pickled
        or hasattr(module, "_checkpoint_wrapped_module")
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def is_tp(model: nn.Module) -> bool:
    """Whether parameters were distributed before any FSDP."""
    return not is_fsdp(model) and any(isinstance(p, DTensor) for p in model.parameters())


def require_before(where: str, model: nn.Module, *steps: str) -> None:
    """Raise ValueError if the model already went through one of ``steps``, naming the right order."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{where}: model must be one module, got a {type(model).__name__}; call {where} for each"
            " part, with the units that are in it"
        )
    done: dict[str, Callable[[nn.Module], bool]] = {
        "apply_fsdp2": is_fsdp,
        "apply_ac / apply_compile": is_wrapped,
        "apply_tp": is_tp,
    }
    for step in steps:
        if done[step](model):
            when = "once" if step == where else "before it"
            raise ValueError(
                f"{where}: the model already went through {step}; call {where} {when} (order: {ORDER})"
            )
