"""Clip gradients by their global norm, over plain tensors and DTensors on any meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

EPSILON = 1e-6  # torch's, so that the scale is the same number
ROW = 512  # entries; their sum in float32 is off by some 1e-7

Ranks = tuple[int, ...]  # the global ranks of a process group
Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None  # None: a plain tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over the whole model is at most ``max_norm``.

    The norm is that of the gradients a single process would have: a sharded gradient counts with
    all its shards, a replicated one (a plain tensor too) once. Partial gradients, which norms have
    under sequence parallelism without FSDP, are summed first and replaced by their sums.

    As in torch, every gradient is multiplied by min(1, max_norm / (norm + 1e-6)) without a look at
    the number, hence without waiting for the device. So a NaN norm makes all gradients NaN, and an
    infinite one makes finite gradients 0 and infinite ones NaN. To skip such a step, test
    ``norm.isfinite()`` before ``optimizer.step()``.

    Args:
        parameters: A tensor or an iterable of them (a generator too); one given twice counts once.
            All ranks of a mesh must give the same ones; those without a gradient count as 0.
        max_norm: From 0; ``math.inf`` only measures.
        norm_type: p of the p-norm, above 0; ``math.inf``: the largest absolute value.
        pp_mesh: 1-D mesh of pipeline stages, to take the norm over the parameters of all of them.

    Returns:
        The norm before clipping: 0-dim, plain, float32 (float64 if a parameter is), equal on all
        ranks.

    Raises:
        ValueError: max_norm is negative or NaN, norm_type not above 0, pp_mesh not 1-D, or a
            gradient sparse.

    Cost: one read and one write of every gradient. One all-reduce of a few numbers for each mesh dim
    that shards any parameter (data x tensor parallel: two), one for ``pp_mesh``, and one per partial
    gradient.

    Source: torch.nn.utils.clip_grad_norm_; mixed meshes: pytorch#180346.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    max_norm, norm_type = float(max_norm), float(norm_type)
    _check(tensors, max_norm, norm_type, pp_mesh)
    device = _norm_device(tensors, pp_mesh)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

    # Which collectives run follows from the parameters: a rank may lack a gradient others have.
    groups: dict[Ranks, dist.ProcessGroup] = {}
    layouts: dict[Layout, tuple[Ranks, ...]] = {None: ()}
    # Gradients by the groups that they are spread over.
    buckets: dict[tuple[Ranks, ...], list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if layout is not None and layout not in layouts:
            layouts[layout] = _spread_over(*layout, groups)
        bucket = buckets.setdefault(layouts[layout], [])
        if (grad := _local_grad(tensor)) is not None:
            bucket.append(grad)

    sums = [_power_sum(grads, norm_type, device, dtype) for grads in buckets.values()]
    for ranks, group in groups.items():
        chosen = [i for i, spread in enumerate(buckets) if ranks in spread]
        for i, reduced in zip(chosen, _all_reduce([sums[i] for i in chosen], norm_type, group)):
            sums[i] = reduced
    total = _add([*sums, _power_sum([], norm_type, device, dtype)], norm_type)
    if pp_mesh is not None and pp_mesh.size() > 1:
        (total,) = _all_reduce([total], norm_type, pp_mesh.get_group())
    norm = _root(total, norm_type)

    if max_norm < math.inf:
        scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
        for grads in _alike([grad for bucket in buckets.values() for grad in bucket]):
            torch._foreach_mul_(grads, scale.to(grads[0].device))  # private, as in _norms
    return norm


def _check(
    tensors: list[Tensor], max_norm: float, norm_type: float, pp_mesh: DeviceMesh | None
) -> None:
    wrong = []
    if not max_norm >= 0:
        wrong.append(f"max_norm={max_norm} must be a number from 0")
    if not norm_type > 0:
        wrong.append(f"norm_type={norm_type} must be above 0, such as 2.0 or math.inf")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        wrong.append(f"pp_mesh has dims {pp_mesh.mesh_dim_names}; pass the 1-D mesh['pp']")
    if sparse := [tuple(t.shape) for t in tensors if t.grad is not None and t.grad.is_sparse]:
        wrong.append(f"gradients of shapes {sparse} are sparse; build embeddings with sparse=False")
    if wrong:
        raise ValueError("clip_grad_norm_: " + "; ".join(wrong))


def _norm_device(tensors: list[Tensor], pp_mesh: DeviceMesh | None) -> torch.device:
    """Where the collectives work, which isn't where gradients are that FSDP offloads."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), pp_mesh)
    if mesh is None:
        return tensors[0].device if tensors else torch.device("cpu")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _spread_over(
    mesh: DeviceMesh, placements: tuple[Placement, ...], groups: dict[Ranks, dist.ProcessGroup]
) -> tuple[Ranks, ...]:
    """The rank groups that hold different shards of a tensor; adds those that are new to ``groups``."""
    spread = []
    for dim, placement in enumerate(placements):
        if mesh.size(dim) > 1 and not placement.is_replicate():
            group = mesh.get_group(dim)
            # By ranks: two meshes over the same ones have two groups, of which one serves.
            ranks = tuple(dist.get_process_group_ranks(group))
            groups.setdefault(ranks, group)
            spread.append(ranks)
    return tuple(spread)


def _local_grad(tensor: Tensor) -> Tensor | None:
    grad = tensor.grad
    if isinstance(grad, DTensor) and isinstance(tensor, DTensor):
        if grad.placements != tensor.placements:  # partial: shards of sums, not summed yet
            tensor.grad = grad = grad.redistribute(placements=tensor.placements)
        grad = grad.to_local()
    return grad if grad is not None and grad.numel() else None


def _power_sum(grads: list[Tensor], p: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[sum of |x|^p]; for p = inf [largest |x|, 1 if any is NaN], as MAX may lose a NaN."""
    if not grads:
        return torch.zeros(2 if p == math.inf else 1, device=device, dtype=dtype)
    norms = [n.to(device) for some in _alike(grads) for n in _norms(some, p, dtype)]
    if p < math.inf:
        return torch.stack(norms).pow(p).sum().reshape(1)
    largest = torch.stack(norms).max()
    return torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().to(dtype)])


def _norms(grads: list[Tensor], p: float, dtype: torch.dtype) -> Iterable[Tensor]:
    if grads[0].device.type == "cpu":
        return [_norm_by_rows(grad, p, dtype) for grad in grads]
    return torch._foreach_norm(grads, p, dtype=dtype)  # private: no public norm of many tensors


def _norm_by_rows(grad: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Norm of norms of short rows: torch's CPU kernel adds one by one, off by 4e-4 at 10^7."""
    values = grad.reshape(-1)
    while values.numel() > ROW:
        end = values.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(values[:end].view(-1, ROW), p, dim=1, dtype=dtype)
        values = torch.cat([rows, values[end:].to(dtype)])
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=dtype)
    return norm


def _alike(grads: list[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and dtype each, as the foreach kernels want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(kinds.values())


def _all_reduce(sums: list[Tensor], p: float, group: dist.ProcessGroup) -> list[Tensor]:
    packed = torch.stack(sums)
    dist.all_reduce(
        packed, op=dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, group=group
    )
    return list(packed.unbind())


def _add(sums: list[Tensor], p: float) -> Tensor:
    stacked = torch.stack(sums)
    return stacked.amax(0) if p == math.inf else stacked.sum(0)


def _root(total: Tensor, p: float) -> Tensor:
    if p < math.inf:
        return total[0].pow(1 / p)
    return torch.where(total[1] > 0, math.nan, total[0])
