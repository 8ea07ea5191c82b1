"""Shard a model's parameters, gradients and optimizer state over data ranks by ``fully_shard``."""

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
from ptx.parallel._blocks import Units, is_container
from ptx.parallel._gathered import keep_fresh
from ptx.parallel._groups import Group, Grouping, plan_groups
from ptx.parallel._order import require_before

Module = TypeVar("Module", bound=nn.Module)


def apply_fsdp2(
    model: Module,
    mesh: DeviceMesh,
    *,
    units: Units | None = None,
    head: str | nn.Module | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - as torch, never changed
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
) -> Module:
    """Shard ``model`` in place: ``fully_shard`` on each unit, then on a root that takes the rest.

    Groups: each unit is gathered and reduced by itself. By default the units are the blocks of
    `find_blocks` and the token embedding. The head (``head``, else ``get_output_embeddings()``, else
    the attribute ``output``) is a group of its own unless a unit holds it. Modules that share a
    parameter are put into one group. Modules without parameters are skipped.

    Freeing: for units ``reshard_after_forward`` means what it means in torch. True frees gathered
    parameters after the forward and gathers them again in the backward, False keeps them, an int
    keeps them sharded over that many neighbouring ranks. The group that holds the head keeps them
    whatever the flag says, so that a loss may use ``model.output`` again and again; the root does
    too, as by torch's default. What is kept is a copy, so: a call without gradients (of the model,
    or of the head by itself) frees it at its end, and a forward gathers anew what one without a
    backward left, if the shards may have changed. But between such a forward and the next
    ``parameters()`` gives the copies: evaluate under ``no_grad`` before you build an optimizer, clip
    or zero gradients. So is what a forward writes into its parameters written to a copy, and lost.

    Root: it is ``model``. If the head lies outside the module that holds all the rest, as in a
    transformers CausalLM, that module is the root and the head stands beside it; ``model(tokens)``
    and ``model.lm_head(model.model(tokens).last_hidden_state)`` are both right. Always call
    modules, never their ``forward``, which would skip the hooks.

    Precision: ``param_dtype`` and ``reduce_dtype`` hold for every group. Floating inputs are cast
    where they enter, at the root and at the head, and not from block to block, so tables that the
    model computes in float32 (RoPE) reach the blocks in float32. ``output_dtype`` is what the root
    and a head in a group of its own return. Gradients have the dtype that the parameters were built
    with. Buffers are never cast.

    Each rank must use the same parameters in a step. If experts or branches depend on the data, call
    the model's ``set_reduce_scatter_unused_params(True)``: gradients would be silently wrong.

    Start: real (not meta) parameters and buffers get the values of the first rank of ``mesh``, so
    ranks can't start apart. Meta tensors are left for `materialize`.

    Args:
        model: Any module, the same on all ranks; after `apply_tp`, `apply_ac` and `apply_compile`,
            before the optimizer is built.
        mesh: What `fsdp_mesh` returned: 1-D, or 2-D for HSDP (replicated over the first dim, sharded
            over the second).
        units: Names or globs, each match a group; a nested list is one group:
            ``["layers.*", ["norm", "output"]]``. Then the embedding belongs to the root, unless it
            is named or tied to the head. ``[]``: no unit.
        head: The output layer or its name, if it isn't found.
        mp_policy: torch's.
        reshard_after_forward: True, False, or an int that divides the shard dim (only if ``mesh``
            spans all ranks; torch can't build its groups otherwise).
        offload_policy: torch's. ``CPUOffloadPolicy`` needs an accelerator.

    Returns:
        The same model. The classes of root, units and head become torch's ``FSDPModule`` as well.
        One rank is wrapped too, so that ``mp_policy`` means the same there.

    Raises:
        ValueError: A model that is sharded already; a mesh that FSDP can't shard over; units, head
            or tied parameters as the message says; an embedding with ``max_norm``, sparse buffers;
            parameters that ``fully_shard`` doesn't take (no
            dim, no elements, mixed dtypes); a wrong int; offloading on CPU. All before any communication.

    Cost: per rank 1/size of parameters, gradients and optimizer state, and one or two whole groups.
    Now one broadcast per real tensor and mesh dim. Per step and group one all-gather (two with
    True) and one reduce-scatter, with HSDP also one all-reduce. An int makes process groups for each
    unit, which takes long to set up on many ranks.

    Source: PyTorch FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054.
    """
    where = "apply_fsdp2"
    require_before(where, model, where)
    _check_mesh(mesh)
    plan = plan_groups(model, units, head, where=where)
    _check_options(model, plan, mesh, mp_policy, reshard_after_forward, offload_policy)
    # On one rank there is nothing to reshard to, whatever the int.
    one_rank = mesh.size(mesh.ndim - 1) == 1
    reshard = bool(reshard_after_forward) if one_rank else reshard_after_forward

    modules = dict(clean_named_modules(model))
    done: set[Tensor] = set()  # synchronised, or sharded by an inner group
    for group in plan.groups:
        members = [modules[name] for name in group.names]
        _start_together(members, mesh, done)
        fully_shard(
            members if len(members) > 1 else members[0],
            mesh=mesh,
            reshard_after_forward=False if group is plan.head_group else reshard,
            mp_policy=_group_policy(mp_policy, group, plan),
            offload_policy=offload_policy,
        )
        done.update(parameter for member in members for parameter in member.parameters())
    root = modules[plan.root]
    _refuse_bare_forward(root, done)
    _start_together([model], mesh, done)
    fully_shard(root, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    head_names = plan.head_group.names if plan.head_group else []
    # One module of each group that a forward leaves gathered, or gathered in part.
    stay = [head_names] if reshard is True else [group.names for group in plan.groups]
    kept = [root, *(modules[names[0]] for names in stay if names)]
    head_members = [modules[name] for name in head_names]
    keep_fresh(
        [model, root], kept, head_members, [root, *(modules[g.names[0]] for g in plan.groups)]
    )
    return model


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"apply_fsdp2: the mesh must be a DeviceMesh, got {mesh!r}; pass ptx.fsdp_mesh(mesh), of"
            " one rank too"
        )
    names = mesh.mesh_dim_names or ()
    # fully_shard reads any 2-D mesh as HSDP: (dp_shard, cp) would be replicated over dp_shard.
    misread = mesh.ndim == 2 and (not names or names[0] in {"dp_shard", "cp"})
    if mesh.ndim not in {1, 2} or misread or {"pp", "tp"} & {*names}:
        raise ValueError(
            "apply_fsdp2: the mesh must be 1-D (sharded over), or 2-D with names (replicated over the"
            f" first dim, sharded over the second), got dims {names} of sizes {tuple(mesh.shape)};"
            " pass ptx.fsdp_mesh(mesh)"
        )


def _check_options(
    model: nn.Module,
    plan: Grouping,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard: bool | int,
    offload_policy: OffloadPolicy,
) -> None:
    wrong = _reshard_errors(reshard, mesh)
    if is_container(model):
        wrong.append(f"the model is a {type(model).__name__}, never called itself; pass its parent")
    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":
        wrong.append("CPUOffloadPolicy needs an accelerator, and the mesh is on cpu; leave it out")
    if scalars := [name for name, p in clean_named_parameters(model) if p.ndim == 0]:
        wrong.append(f"{scalars} have no dim to shard; give them shape [1]")
    if empty := [name for name, p in clean_named_parameters(model) if 0 in p.shape]:
        wrong.append(f"{empty} have no elements, which torch can't reduce; make them buffers")
    sparse = [n for n, b in model.named_buffers() if b.layout is not torch.strided]
    if sparse:
        wrong.append(f"buffers {sparse} are sparse; register their indices and values instead")
    renormed = [
        name
        for name, module in clean_named_modules(model)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    if renormed:
        wrong.append(f"{renormed} write to their weight (max_norm), of which a forward has a copy")
    seen: set[nn.Parameter] = set()
    modules = dict(clean_named_modules(model))
    for names in (*(group.names for group in plan.groups), [""]):
        held = {p for name in names for p in modules[name].parameters()} - seen
        seen |= held
        dtypes = sorted({str(p.dtype) for p in held if p.requires_grad})
        if len(dtypes) > 1:
            what = names if names[0] else "what no unit holds"
            wrong.append(f"{what} mixes trainable {' and '.join(dtypes)}; split it into units")
    head_shares = plan.head_group is not None and len(plan.head_group.names) > 1
    if mp_policy.output_dtype is not None and plan.root and head_shares:
        wrong.append(
            f"output_dtype={mp_policy.output_dtype} can't be kept, as {plan.head!r} shares a group and"
            f" lies outside the root {plan.root!r}; leave it out, and cast the logits"
        )
    if wrong:
        raise ValueError("apply_fsdp2: " + "; ".join(wrong))


def _reshard_errors(reshard: bool | int, mesh: DeviceMesh) -> list[str]:
    size = mesh.size(mesh.ndim - 1)
    if isinstance(reshard, bool) or (isinstance(reshard, int) and reshard > 0 and size == 1):
        return []
    given = f"reshard_after_forward={reshard!r}"
    if not isinstance(reshard, int) or reshard < 2 or size % reshard:
        return [f"{given} must be True, False, or an int from 2 that divides the shard dim, {size}"]
    if reshard < size and mesh.size() != dist.get_world_size():
        # fully_shard makes groups of these ranks only, and the other ranks wait for theirs: a hang.
        return [
            f"{given} needs a mesh over all {dist.get_world_size()} ranks, this one has"
            f" {mesh.size()}; pass True"
        ]
    return []


def _group_policy(
    policy: MixedPrecisionPolicy, group: Group, plan: Grouping
) -> MixedPrecisionPolicy:
    if group is not plan.head_group:
        return replace(policy, output_dtype=None, cast_forward_inputs=False)
    # The policy is that of each member, and an embedding must not return output_dtype.
    return policy if len(group.names) == 1 else replace(policy, output_dtype=None)


def _start_together(modules: Iterable[nn.Module], mesh: DeviceMesh, done: set[Tensor]) -> None:
    """Copy every real tensor from the first rank; ``fully_shard`` keeps what each rank has."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor in done:
                continue
            done.add(tensor)
            if not isinstance(tensor, DTensor):
                # fully_shard would do the first itself, and wants the second.
                if not tensor.is_meta and tensor.device != device:
                    tensor.data = tensor.data.to(device)
                if not tensor.is_contiguous():
                    tensor.data = tensor.data.contiguous()
            if not tensor.is_meta:
                _broadcast(tensor, mesh)


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel():
        local = local.detach()
        whole = local.resolve_conj().resolve_neg()  # copies, if these are pending
        data = whole.reshape(-1).view(torch.uint8)  # no backend knows all dtypes
        for dim in range(mesh.ndim):  # over the replicas first, then inside each
            if mesh.size(dim) > 1:
                dist.broadcast(data, group=mesh.get_group(dim), group_src=0)
        if whole is not local:
            local.copy_(whole)


def _refuse_bare_forward(root: nn.Module, taken: set[Tensor]) -> None:
    """Have ``root.forward``, called past the hooks, say so; torch complains of mixed tensors."""
    own = (
        (module, key, parameter)
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter not in taken
    )
    if (first := next(own, None)) is None:
        return
    module, key, parameter = first
    dims = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    forward = root.forward

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        now: Tensor | None = module._parameters[key]
        if isinstance(now, DTensor) and now.device_mesh.ndim > dims:
            raise ValueError(
                f"apply_fsdp2: {type(root).__name__}.forward was called past __call__, whose hooks"
                " gather the parameters; call the module itself: model(...)"
            )
        return forward(*args, **kwargs)

    root.forward = checked
