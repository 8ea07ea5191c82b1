"""Who owns the weight of a head: the caller, tensor parallelism, FSDP2, or both."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# FSDP's table of the modules it wrapped. Private, but the only way to ask who owns a parameter: a
# shard of FSDP's looks like one of tensor parallelism's.
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# Hooks of these do to a module's input and output what the loss does by itself.
_KNOWN_HOOKS = ("torch.distributed.tensor.", "torch.distributed.fsdp.", "ptx.parallel.")


@dataclass(frozen=True)
class Head:
    """x @ weight.T + bias, and how to get at the two.

    Args:
        weight: [V, H] in its global shape, as it is registered now.
        bias: [V], or None.
        module: Where they are registered, if a module was given.
        state: The FSDP state whose group holds them, if there is one.
        alone: Whether this group holds nothing else.
    """

    weight: Tensor
    bias: Tensor | None
    module: nn.Module | None = None
    state: Any = None
    alone: bool = False

    def input_dtype(self, hidden: torch.dtype) -> torch.dtype:
        """What FSDP's mixed precision would make of a hidden state at the head's door."""
        if self.state is None or not self.state._mp_policy.cast_forward_inputs:
            return hidden
        return self.state._mp_policy.param_dtype or hidden

    def dtype(self) -> torch.dtype:
        """Of the weight, once it is gathered."""
        if self.state is None:
            return self.weight.dtype
        return self.state._mp_policy.param_dtype or self.weight.dtype

    def is_ready(self) -> bool:
        """Whether the FSDP model that holds the head was called: till then it has no root.

        A head that is called first would become one itself.
        """
        if self.module is None or self.state is None or self.state._is_root is not None:
            return True
        owners = {id(m): m for state in _fsdp_states() for m in state._modules}
        return not any(
            self.module in set(owner.modules())
            for owner in owners.values()
            if owner is not self.module
        )

    def open(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gather what FSDP has sharded: ``hidden`` as the head would see it, weight, bias."""
        if self.module is None or self.state is None:
            return hidden, self.weight, self.bias
        if self.alone:
            # As a call of the head, so its gradients are reduced as soon as they are there, while
            # the backward of the rest goes on.
            (hidden,), _ = self.state._pre_forward(self.module, (hidden,), {})
        else:
            self.state._modules[0].unshard()
            hidden = hidden.to(self.input_dtype(hidden.dtype))
        return hidden, _parameter(self.module, "weight"), self.module._parameters["bias"]

    def close(self, hidden: Tensor, *results: Tensor) -> None:
        """Have the backward of ``results`` reduce the gradients; if there is none, free the weight.

        Left gathered, later writes to ``parameters()`` would be lost, and an optimizer built on
        them would train nothing.
        """
        if self.state is None:
            return
        if self.alone:
            # What it returns is in the policy's output_dtype, which isn't for losses.
            self.state._post_forward(self.module, (hidden,), results)
        else:
            # Without it, no hook of FSDP's runs if the hidden state needs no gradient.
            self.state._register_pre_backward_hook(results)
        if not any(result.requires_grad for result in results) and not self._is_running():
            self.state._modules[0].reshard()

    def _is_running(self) -> bool:
        """Whether the loss was called inside the forward that holds the head, which isn't over.

        Its other parameters may still be needed; FSDP frees them all when it returns. (A group of
        several modules counts as running until all were called, and the head never is.)
        """
        forward = self.state._training_state.name == "FORWARD"
        return forward and len(self.state._modules) == 1


def find_head(head: Tensor | nn.Module, bias: Tensor | None, where: str) -> Head:
    """Look up who owns the head, without any communication.

    Raises:
        ValueError: A module that computes something else, or a bare weight that FSDP has sharded.
    """
    if isinstance(head, nn.Module):
        return _of_module(head, bias, where)
    if not isinstance(head, Tensor):
        raise ValueError(
            f"{where}: head is a {type(head).__name__}, it must be a weight [V, H] or a module"
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(
            f"{where}: bias is a {type(bias).__name__}, it must be a tensor [V] or None"
        )
    for given, name in ((head, "weight"), (bias, "bias")):
        if isinstance(given, DTensor) and _is_fsdp_shard(given):
            raise ValueError(
                f"{where}: the head's {name} is FSDP's shard, whose gradient only FSDP can reduce;"
                " pass the head module itself (head=model.output), which gathers it"
            )
    return Head(head, bias)


def _is_fsdp_shard(tensor: DTensor) -> bool:
    # By the mesh too: a detached or cast shard is another tensor.
    return any(
        parameter.sharded_param is tensor
        or (parameter.mesh_info.mesh == tensor.device_mesh and parameter._orig_size == tensor.shape)
        for _, parameter in _fsdp_parameters()
    )


def local_part(tensor: Tensor, name: str, where: str) -> tuple[Tensor, DeviceMesh | None]:
    """A weight's or bias's rows on this rank, and the mesh they are split over if they are."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh = split_over(tensor, name, where)
    local: Tensor = tensor.to_local()
    return local, mesh


def split_over(tensor: Tensor, name: str, where: str) -> DeviceMesh | None:
    """The 1-D mesh that a gathered weight's rows are split over; None: this rank has them all."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if all(isinstance(placement, Replicate) for placement in placements) or mesh.size() == 1:
        return None
    # By type: a strided shard has its rows in another order, and is a subclass in some versions.
    if mesh.ndim == 1 and type(placements[0]) is Shard and placements[0].dim == 0:
        return mesh
    raise ValueError(
        f"{where}: the head's {name} is a DTensor with placements {placements} on a {mesh.ndim}-D"
        " mesh; it takes Shard(0) (as apply_tp leaves it) or Replicate() on the 1-D tp mesh"
    )


def _of_module(module: nn.Module, bias: Tensor | None, where: str) -> Head:
    wrong = []
    if bias is not None:
        wrong.append("bias was given beside a module, which has its own; leave it out")
    if not (isinstance(module, nn.Linear) and _is_linear(module)):
        wrong.append(
            f"{type(module).__name__} has a forward other than nn.Linear's, and only x @ W.T (+ b)"
            " can be computed here; pass the nn.Linear inside, or ptx.cross_entropy its logits"
        )
    elif hooks := _foreign_hooks(module):
        wrong.append(
            f"the head has hooks {hooks} that would be skipped; remove them, or use"
            " ptx.cross_entropy on its logits"
        )
    elif computed := _computed_from_fsdp(module):
        # Of shards it would be a shard too, and be taken for one of tensor parallelism's.
        wrong.append(
            f"the head's {computed} is computed (by a parametrization?) from parameters that FSDP"
            " shards, and can't be gathered; remove the parametrization, or use ptx.cross_entropy"
            " on its logits"
        )
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")
    weight, own_bias = _parameter(module, "weight"), getattr(module, "bias", None)
    state = _owner(module)
    alone = state is not None and tuple(state._modules) == (module,)
    return Head(weight, own_bias, module, state, alone)


def gathers(head: object) -> bool:
    """Whether FSDP has to gather the head's weight, without a check of anything else."""
    return isinstance(head, nn.Module) and _owner(head) is not None


def _owner(module: nn.Module) -> Any:
    """The FSDP state whose group holds the weight of ``module``; None: there is none."""
    for state, parameter in _fsdp_parameters():
        info = parameter._module_info
        names = zip(
            (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
        )
        if (module, "weight") in names:
            return state
    return None


def _computed_from_fsdp(module: nn.Linear) -> list[str]:
    """Which of weight and bias aren't parameters, if FSDP has any parameter of the module."""
    computed = [name for name in ("weight", "bias") if name not in module._parameters]
    if not computed:
        return []
    inside = set(module.modules())
    return computed if any(p._module_info.module in inside for _, p in _fsdp_parameters()) else []


def _is_linear(module: nn.Linear) -> bool:
    if type(module).forward is not nn.Linear.forward:
        return False
    override = module.__dict__.get("forward")
    # apply_fsdp2 puts a check around a root's; others replace it to compute something else.
    return override is None or (
        _home(override).startswith("ptx.parallel.")
        and _home(inspect.unwrap(override)) == nn.Linear.__module__
    )


def _home(function: Any) -> str:
    """The module a function was written in: functools.wraps replaces its ``__module__``."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name


def _foreign_hooks(module: nn.Module) -> list[str]:
    hooks = (
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    )
    return [
        getattr(hook, "__qualname__", repr(hook))
        for hook in hooks
        if not (getattr(hook, "__module__", None) or "").startswith(_KNOWN_HOOKS)
    ]


def _fsdp_states() -> list[Any]:
    states = {}
    for reference in list(_module_state_mapping.values()):  # torch.compile can't trace a generator
        state = reference()
        if state is not None and hasattr(state, "_fsdp_param_groups"):
            states[id(state)] = state
    return list(states.values())


def _fsdp_parameters() -> list[tuple[Any, Any]]:
    """Every live FSDP state with each parameter of its groups."""
    return [
        (state, parameter)
        for state in _fsdp_states()
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
    ]


def _parameter(module: nn.Module, name: str) -> Tensor:
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value
