"""Clip gradients by their global norm, over plain tensors and DTensors on any meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptx.parallel._sums import Ranks, Spread, alike, norms, sum_device, sum_dtype

EPSILON = 1e-6  # torch's, so that the scale is the same number


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
    device, dtype = sum_device(tensors, pp_mesh), sum_dtype(tensors)

    # Which collectives run follows from the parameters: a rank may lack a gradient others have.
    spread = Spread()
    # Gradients by the groups that they are spread over.
    buckets: dict[tuple[Ranks, ...], list[Tensor]] = {}
    for tensor in tensors:
        bucket = buckets.setdefault(spread.of(tensor), [])
        if (grad := _local_grad(tensor)) is not None:
            bucket.append(grad)

    sums = [_power_sum(grads, norm_type, device, dtype) for grads in buckets.values()]
    for ranks, group in spread.groups.items():
        chosen = [i for i, over in enumerate(buckets) if ranks in over]
        for i, reduced in zip(chosen, _all_reduce([sums[i] for i in chosen], norm_type, group)):
            sums[i] = reduced
    total = _add([*sums, _power_sum([], norm_type, device, dtype)], norm_type)
    if pp_mesh is not None and pp_mesh.size() > 1:
        (total,) = _all_reduce([total], norm_type, pp_mesh.get_group())
    norm = _root(total, norm_type)

    if max_norm < math.inf:
        scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
        for grads in alike(grad for bucket in buckets.values() for grad in bucket):
            torch._foreach_mul_(grads, scale.to(grads[0].device))  # private, as in `norms`
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
    each = torch.stack([n.to(device) for some in alike(grads) for n in norms(some, p, dtype)])
    if p < math.inf:
        return each.pow(p).sum().reshape(1)
    largest = each.max()
    return torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().to(dtype)])


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
