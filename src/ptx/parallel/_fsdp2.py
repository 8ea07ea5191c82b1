"""Shard a model's parameters, gradients and optimizer state over data ranks with torch's ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ptx._names import clean_named_modules, clean_named_parameters
from ptx.parallel._blocks import Units
from ptx.parallel._groups import Group, Grouping, plan_groups
from ptx.parallel._order import require_before

Module = TypeVar("Module", bound=nn.Module)


def apply_fsdp2(
    model: Module,
    mesh: DeviceMesh,
    *,
    units: Units | None = None,
    head: str | nn.Module | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - torch's own default, never changed
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
) -> Module:
    """Shard ``model`` in place: ``fully_shard`` on each unit, inner to outer, and on a root that takes the rest.

    **Groups.** Each unit is gathered and reduced by itself. By default the units are the blocks of `find_blocks` and the
    token embedding. The head (``get_output_embeddings()``, else the attribute ``output``, else ``head``) is a group of
    its own unless a unit holds it. Modules that share a parameter are put into one group. Submodules without
    parameters are skipped.

    **When unsharded parameters are freed.** ``reshard_after_forward`` means for units what it means in torch: True frees them
    after the forward and gathers them again in the backward, False keeps them, an int keeps them sharded over that many
    neighbouring ranks. The group with the head always keeps them, so that a loss that works on ``model.output`` in
    chunks gathers it once; so does the root, as in torch (``None``).

    **Outside the root.** The root is the model. If the head lies outside the module that holds everything else, as in a
    transformers CausalLM, that module is the root and the head stands beside it, so ``model(tokens)`` and
    ``model.lm_head(model.model(tokens).last_hidden_state)`` both work. Call modules, never their ``forward``.

    **Precision.** ``param_dtype`` and ``reduce_dtype`` hold everywhere. Floating inputs are cast where they come in from
    outside, at the root and the group with the head, and not from block to block, so a table that the model
    computes in float32 (RoPE) reaches its blocks in float32. ``output_dtype`` is what the root and the head return.
    Gradients have the dtype of the parameters as they were built. Buffers are never cast.

    **Start.** Real (not meta) parameters and buffers get the values of the first rank of ``mesh``, so ranks can't start
    apart. Meta tensors are left for `materialize`.

    Args:
        model: Any module, after `apply_tp`, `apply_ac` and `apply_compile`, before the optimizer is built.
        mesh: What `fsdp_mesh` returned: 1-D, or 2-D for HSDP (replicated over the first dim, sharded over the second).
        units: Names or globs, each match a group; a nested list is one group: ``["layers.*", ["norm", "output"]]``. With
            own units the embedding is left to the root, unless named.
        head: Name of the output layer, or the module, if it isn't found.
        mp_policy: torch's.
        reshard_after_forward: True, False, or an int that divides the shard dim.
        offload_policy: torch's; ``CPUOffloadPolicy`` needs an accelerator.

    Returns:
        The same model. Its class and that of each unit get torch's ``FSDPModule`` mixed in. One rank is wrapped too, so
        that ``mp_policy`` means the same there.

    Raises:
        ValueError: The mesh isn't 1-D or 2-D or has a dim that FSDP can't shard over; units, head or tied parameters
            as in the message; parameters that ``fully_shard`` can't take; an int that doesn't divide the shard dim;
            offloading on CPU; a model that is already sharded. All before any communication.

    Cost: per rank 1/size of parameters, gradients and optimizer state, and one group (two while it prefetches) in full. One
    broadcast per real tensor and mesh dim now; per step an all-gather (two with True) and a reduce-scatter per group,
    with HSDP an all-reduce more. An int makes two process groups per unit.

    Source: PyTorch FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054; ties: pytorch#176076; HSDP start: torchtitan#1777.
    """
    where = "apply_fsdp2"
    require_before(where, model, where)
    _check_mesh(mesh)
    plan = plan_groups(model, units, head, where=where)
    reshard = _check_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1))
    _check_rest(model, plan, mesh, mp_policy, offload_policy)
    modules = dict(clean_named_modules(model))
    done: set[Tensor] = set()  # synchronised, or sharded already
    for group in plan.groups:
        members = [modules[name] for name in group.names]
        _start_together(members, mesh, done)
        fully_shard(
            members if len(members) > 1 else members[0],
            mesh=mesh,
            reshard_after_forward=reshard if group is not plan.head_group else False,
            mp_policy=_group_policy(mp_policy, group, plan),
            offload_policy=offload_policy,
        )
        done.update(parameter for member in members for parameter in member.parameters())
    root = modules[plan.root]
    _refuse_bare_forward(root, done)
    _start_together([model], mesh, done)
    fully_shard(
        root,
        mesh=mesh,
        reshard_after_forward=None,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    return model


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    # Any 2-D mesh means HSDP to fully_shard, so (dp_shard, cp) would silently be replicated over dp_shard.
    not_sharded = {"pp", "tp"} & {*names} or (mesh.ndim == 2 and {*names[:1]} & {"dp_shard", "cp"})
    if mesh.ndim not in (1, 2) or not_sharded or len(names) < mesh.ndim > 1:
        raise ValueError(
            f"apply_fsdp2: the mesh must be 1-D (sharded) or 2-D with names (replicated over the first dim, sharded over"
            f" the second), got dims {names or None} of sizes {tuple(mesh.shape)}; pass ptx.fsdp_mesh(mesh)"
        )


def _check_reshard(value: bool | int, shard_size: int) -> bool | int:
    if (
        isinstance(value, bool) or shard_size == 1
    ):  # nothing to reshard to on one rank, whatever the number
        return bool(value)
    if not isinstance(value, int) or value < 2 or shard_size % value:
        raise ValueError(
            f"apply_fsdp2: reshard_after_forward={value!r} must be True, False, or an int from 2 that divides the shard dim"
            f" of size {shard_size}"
        )
    return value


def _check_rest(
    model: nn.Module,
    plan: Grouping,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> None:
    wrong = []
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":
        wrong.append(
            "CPUOffloadPolicy needs an accelerator, the mesh is on cpu; leave offload_policy out"
        )
    if scalars := [name for name, p in clean_named_parameters(model) if p.ndim == 0]:
        wrong.append(f"{scalars} have no dim to shard; give them shape [1]")
    seen: set[nn.Parameter] = set()
    modules = dict(clean_named_modules(model))
    for names in (*(group.names for group in plan.groups), [""]):
        held = {p for name in names for p in modules[name].parameters()} - seen
        seen |= held
        dtypes = {str(p.dtype) for p in held if p.requires_grad}
        if len(dtypes) > 1:
            what = names if names[0] else "the rest of the model"
            wrong.append(
                f"{what} mixes trainable {' and '.join(sorted(dtypes))}; give each dtype units of its own"
            )
    shared_head = plan.head_group is not None and len(plan.head_group.names) > 1
    if mp_policy.output_dtype is not None and plan.root and shared_head:
        wrong.append(
            f"output_dtype can't be kept, as {plan.head!r} shares a group and lies outside the root {plan.root!r}; leave it"
            " out and cast the logits"
        )
    if wrong:
        raise ValueError("apply_fsdp2: " + "; ".join(wrong))


def _group_policy(
    policy: MixedPrecisionPolicy, group: Group, plan: Grouping
) -> MixedPrecisionPolicy:
    if group is not plan.head_group:
        return replace(policy, output_dtype=None, cast_forward_inputs=False)
    # The policy holds for each member; an embedding that shares the head's group must not return output_dtype.
    return policy if len(group.names) == 1 else replace(policy, output_dtype=None)


def _start_together(modules: Iterable[nn.Module], mesh: DeviceMesh, done: set[Tensor]) -> None:
    """Copy every real tensor from the first rank of the mesh; ``fully_shard`` keeps what each rank has."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor in done or tensor.is_meta:
                continue
            done.add(tensor)
            if not isinstance(tensor, DTensor):
                # As fully_shard does: communication needs the first, sharding the second.
                tensor.data = tensor.data.to(device).contiguous()
            _broadcast(tensor, mesh)


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.numel():
        data = local.reshape(-1).view(torch.uint8)  # as bytes: some backends don't know some dtypes
        for dim in range(mesh.ndim):  # the first replica gets it right in its own shard dim, last
            if mesh.size(dim) > 1:
                dist.broadcast(data, group=mesh.get_group(dim), group_src=0)


def _refuse_bare_forward(root: nn.Module, taken: set[Tensor]) -> None:
    """Have ``root.forward`` say what is wrong when it is called past the hooks, where the root's parameters are shards."""
    own = [
        (m, key)
        for m in root.modules()
        for key, p in m._parameters.items()
        if p is not None and p not in taken
    ]
    if not own:
        return
    module, key = own[0]
    whole = module._parameters[key]
    dims = whole.device_mesh.ndim if isinstance(whole, DTensor) else 0
    forward = root.forward

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        now: Tensor | None = module._parameters[key]
        if isinstance(now, DTensor) and now.device_mesh.ndim > dims:
            raise ValueError(
                f"apply_fsdp2: {type(root).__name__}.forward was called directly, past the hooks of __call__ that gather"
                " the parameters; call the model itself, model(...)"
            )
        return forward(*args, **kwargs)

    root.forward = checked
