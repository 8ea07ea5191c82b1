"""What parallelism did to a module, to be looked through: classes, hooks, wrappers, dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Code of these parts is parallelism's own; all hooks of others are the model's.
_PARALLEL = ("torch.distributed.", "ptx.parallel.")
# Marks that later steps leave on a module: on a part of a pipeline, and on a module that stands in
# another's place and holds that one under this name.
PART_KEY = "_ptx_part"
PLAIN_KEY = "_ptx_plain"
WHERE = "estimate_flops_fake"


def refuse_unseen(module: nn.Module) -> None:
    """Raise for modules whose whole can't be read from what is left on this rank."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{WHERE}: {kind} is scripted; count the module it was made of")
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            f"{WHERE}: {kind} has no shape yet; call the model once, or build it with shapes"
        )
    fsdp1 = sys.modules.get("torch.distributed.fsdp")
    if fsdp1 is not None and isinstance(module, fsdp1.FullyShardedDataParallel):
        raise ValueError(
            f"{WHERE}: {kind} keeps one flat parameter; count the model before it is wrapped"
        )
    if PART_KEY in vars(module) or _lacks_layers(module):
        raise ValueError(
            f"{WHERE}: {kind} is a part of a pipeline, and the count is of the whole"
            " model; count it before apply_pp"
        )


def _lacks_layers(module: nn.Module) -> bool:
    model = sys.modules.get("ptx.model._transformer")
    if model is None or not isinstance(module, model.Transformer):
        return False
    layers: int = module.args.n_layers
    return len(module.layers) < layers


def inner_module(module: nn.Module) -> nn.Module | None:
    """What a wrapper that only adds communication or compilation wraps, or another stands in for."""
    plain: nn.Module | None = vars(module).get(PLAIN_KEY)
    if plain is not None:
        return plain
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return module._modules["module"]
    if type(module).__name__ == "OptimizedModule":  # torch.compile's; importing it is slow
        return module._modules["_orig_mod"]
    return None


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module before it was sharded."""
    kind = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and issubclass(kind, fsdp.FSDPModule):
        kind = next(base for base in kind.__bases__ if not issubclass(base, fsdp.FSDPModule))
    styles = sys.modules.get("ptx.parallel._tp_styles")
    if styles is not None and issubclass(kind, styles._OneHead):
        kind = nn.Linear  # of replicated heads each rank computed one
    return kind


def is_parallel(function: Callable[..., Any]) -> bool:
    """Whether a hook is parallelism's."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.startswith(_PARALLEL)


def overrides_method(name: str, value: Any) -> bool:
    """Whether an attribute of an instance is a method that FSDP put over the class's own.

    ``functools.wraps`` gives it the method's ``__module__``, so its home is told by its globals.
    """
    home = getattr(getattr(value, "__func__", None), "__globals__", {}).get("__name__", "")
    return name != "forward" and home.startswith("torch.distributed.")


def restored(module: nn.Module, name: str, value: Any) -> Any:
    """An attribute as it was before tensor parallelism: apply_tp changes one, of transformers."""
    hooks = module._forward_pre_hooks.values()
    if name != "num_key_value_groups" or not any(
        getattr(hook, "__module__", "") == "ptx.parallel._tp_inputs" for hook in hooks
    ):
        return value
    config: Any = module.config
    return config.num_attention_heads // config.num_key_value_heads


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that FSDP computes in, if it is another than the parameters'."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            dtype: torch.dtype | None = part._get_fsdp_state()._mp_policy.param_dtype
            if dtype is not None:
                return dtype
    return None


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without importing them."""
    parts = sys.modules.get("torch.distributed.tensor")
    return parts is not None and isinstance(tensor, parts.DTensor)
