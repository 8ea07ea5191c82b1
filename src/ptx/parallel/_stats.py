"""Norms, largest entries and non-finite counts of parameters and gradients, over the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from ptx._names import clean_named_parameters
from ptx.parallel._sums import Ranks, Spread, alike, norms, sum_device, sum_dtype

COLUMNS = (
    "param/norm",
    "param/max_abs",
    "param/nonfinite",
    "grad/norm",
    "grad/max_abs",
    "grad/nonfinite",
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BATCH = 2**24  # entries measured at once on an accelerator; bounds the temporary copies


@dataclass(frozen=True, eq=False)
class ModelStats:
    """What `model_stats` returns. Reading a number waits for the device, nothing before does.

    ``norm`` (2-norm) and ``max_abs`` are of the finite entries, ``nonfinite`` counts the others.

    Attributes:
        names: Of the parameters, without wrapper prefixes; shared ones once, by their first name.
        table: [1 + len(names), 6], float32 (float64 if a parameter is), on the device that gradients
            are communicated from, equal on all ranks. First the whole model, then each parameter;
            the columns are norm, max_abs and nonfinite of the parameter, then of its gradient.
    """

    names: tuple[str, ...]
    table: Tensor

    def __getitem__(self, key: str) -> Tensor:
        """``stats["grad/norm"]``: one number of the whole model, 0-dim, without a sync."""
        if key not in COLUMNS:
            raise KeyError(f"{key!r} is none of {', '.join(COLUMNS)}")
        return self.table[0, COLUMNS.index(key)]

    def flat(self, *, by_name: bool = False) -> dict[str, float]:
        """For a log: ``{"grad/norm": 1.2, ...}``, by one copy from the device.

        Args:
            by_name: Also ``"grad/norm/layers.0.attention.wq.weight"`` and so on.
        """
        total, *rows = (self.table if by_name else self.table[:1]).tolist()
        flat = dict(zip(COLUMNS, total))
        for i, column in enumerate(COLUMNS):
            flat.update({f"{column}/{name}": row[i] for name, row in zip(self.names, rows)})
        return flat


@torch.no_grad()
def model_stats(
    model: nn.Module | Sequence[nn.Module], *, pp_mesh: DeviceMesh | None = None
) -> ModelStats:
    """Measure all parameters and gradients as a single process would see them.

    Shards count all together, replicas (plain tensors too) once, and partial gradients, which norms
    have under sequence parallelism without FSDP, as their sums. It measures what is there and
    changes nothing: call it after the step's last backward, and before clipping for the gradients
    that the loss gave. Entries that aren't finite are counted and left out of the other numbers.

    Args:
        model: Any module, or a list of parts; all ranks of a mesh hold the same parameters. Those
            without a gradient count as if it were 0.
        pp_mesh: 1-D mesh of pipeline stages, to total over all of them. Rows by name are always of
            this rank's parts.

    Returns:
        A `ModelStats`; ``flat()`` makes a dict of floats of it.

    Raises:
        ValueError: Parameters on meta, two parts with a parameter of the same name, or a pp_mesh
            that isn't 1-D.

    Cost: a few reads of every parameter and gradient, and copies of at most 2^24 entries. Two small
    all-reduces (a sum, a maximum) for each mesh dim that shards any parameter, and two for
    ``pp_mesh``; one more of the partial gradients, per dim and dtype. Sums of squares are float32
    (float64 if a parameter is): entries above 1e19 give an infinite norm.
    """
    parameters = _named_parameters(model, pp_mesh)
    device, dtype = sum_device(parameters.values(), pp_mesh), sum_dtype(parameters.values())
    spread = Spread()
    # By the groups that a parameter is spread over, so that what is reduced together lies together.
    buckets: dict[tuple[Ranks, ...], list[str]] = {}
    for name, parameter in parameters.items():
        buckets.setdefault(spread.of(parameter), []).append(name)
    order = [name for bucket in buckets.values() for name in bucket]
    chosen = [parameters[name] for name in order]

    local = [_local(parameter) for parameter in chosen]
    each = _measure([*local, *_local_grads(chosen, spread)], device, dtype)
    each = each.view(2, len(order), 3).transpose(0, 1).contiguous()  # [parameters, 2, 3]
    rows_of: dict[tuple[Ranks, ...], slice] = {}
    for over, bucket in buckets.items():
        start = max((rows.stop for rows in rows_of.values()), default=0)
        rows_of[over] = slice(start, start + len(bucket))
    for ranks, group in spread.groups.items():
        blocks = [rows for over, rows in rows_of.items() if ranks in over]
        if blocks:
            reduced = _all_reduce(torch.cat([each[rows] for rows in blocks]), group)
            for rows, values in zip(blocks, reduced.split([r.stop - r.start for r in blocks])):
                each[rows] = values
    total = torch.cat([each.new_zeros(1, 2, 3), each])
    total = torch.cat([total[..., :2].sum(0), total[..., 2:].amax(0)], dim=-1)  # [2, 3]
    if pp_mesh is not None and pp_mesh.size() > 1:
        total = _all_reduce(total, pp_mesh.get_group())

    row_of = dict(zip(order, each.unbind()))
    table = torch.stack([total, *(row_of[name] for name in parameters)])
    squares, bad, largest = table.unbind(-1)
    return ModelStats(
        tuple(parameters), torch.stack([squares.sqrt(), largest, bad], dim=-1).flatten(1)
    )


def _named_parameters(
    model: nn.Module | Sequence[nn.Module], pp_mesh: DeviceMesh | None
) -> dict[str, nn.Parameter]:
    parameters: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    wrong = []
    for part in [model] if isinstance(model, nn.Module) else model:
        for name, parameter in clean_named_parameters(part):
            if parameter.is_meta:
                wrong.append(f"{name!r} is on meta; call materialize first")
            elif name in parameters and parameter not in seen:
                wrong.append(f"two parts have a parameter {name!r}; call it for each of them")
            if parameter not in seen:
                seen.add(parameter)
                parameters[name] = parameter
    if pp_mesh is not None and pp_mesh.ndim != 1:
        wrong.append(f"pp_mesh has dims {pp_mesh.mesh_dim_names}; pass the 1-D mesh['pp']")
    if wrong:
        raise ValueError("model_stats: " + "; ".join(wrong))
    return parameters


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_grads(parameters: list[nn.Parameter], spread: Spread) -> list[Tensor | None]:
    """Gradients laid out as their parameters, with partial ones summed, all of a mesh dim at once."""
    grads: list[Tensor | None] = []
    summands: dict[tuple[Ranks, torch.dtype], list[int]] = {}
    for i, parameter in enumerate(parameters):
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            if dims := _partial_dims(grad, parameter):
                for dim in dims:
                    key = (spread.group(grad.device_mesh, dim), grad.dtype)
                    summands.setdefault(key, []).append(i)
            elif grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
        if grad is not None and grad.is_sparse:
            grad = grad.coalesce().values()
        grads.append(None if grad is None else _local(grad))
    for (ranks, _), which in summands.items():
        # A copy, for the gradients stay as they are.
        packed = torch.cat([grad.reshape(-1) for i in which if (grad := grads[i]) is not None])
        dist.all_reduce(packed, group=spread.groups[ranks])
        sizes = [grad.numel() for i in which if (grad := grads[i]) is not None]
        for i, summed in zip(which, packed.split(sizes)):
            grads[i] = summed
    return grads


def _partial_dims(grad: DTensor, parameter: DTensor) -> list[int]:
    """The mesh dims over which to sum, if that is all that makes the layouts differ."""
    pairs = list(zip(grad.placements, parameter.placements))
    dims = [
        dim
        for dim, (have, want) in enumerate(pairs)
        if type(have) is Partial and have.reduce_op == "sum" and want.is_replicate()
    ]
    others = [have == want for dim, (have, want) in enumerate(pairs) if dim not in dims]
    return dims if all(others) else []


def _measure(tensors: list[Tensor | None], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, 3]: sum of squares, number of non-finite entries, largest |x|; 0 where there is no tensor."""
    rows: dict[int, Tensor] = {}
    there = {i: _as_float(t) for i, t in enumerate(tensors) if t is not None and t.numel()}
    for i, tensor in there.items():
        if tensor.device.type == "cpu":
            rows[i] = _measure_on_cpu(tensor, dtype)
    rest = {id(tensor): i for i, tensor in there.items() if i not in rows}
    for some in alike(there[i] for i in rest.values()):
        rows.update({rest[id(t)]: row for t, row in zip(some, _measure_many(some, dtype))})
    nothing = torch.zeros(3, dtype=dtype, device=device)
    found = [rows[i].to(device) if i in rows else nothing for i in range(len(tensors))]
    return torch.stack(found) if found else nothing.new_zeros(0, 3)


def _as_float(tensor: Tensor) -> Tensor:
    """What norms can be taken of: not so of complex numbers' maxima, float8 or quantised integers."""
    tensor = tensor.abs() if tensor.is_complex() else tensor
    return tensor if tensor.dtype in FLOATS else tensor.float()


def _measure_on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    low, high = tensor.aminmax()
    bad = torch.zeros((), dtype=dtype)
    if not math.isfinite(low) or not math.isfinite(high):  # else masks would be most of the work
        finite = tensor.isfinite()
        bad = (tensor.numel() - finite.count_nonzero()).to(dtype)
        tensor = tensor.masked_fill(~finite, 0.0)
        low, high = tensor.aminmax()
    (norm,) = norms([tensor], 2.0, dtype)
    return torch.stack([norm.square(), bad, torch.maximum(-low, high).to(dtype)])


def _measure_many(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As above for many at once; some ten kernels for each BATCH, and no look at the numbers."""
    pieces = [list(tensor.reshape(-1).split(BATCH)) for tensor in tensors]
    tables = []
    for batch in _batches(piece for some in pieces for piece in some):
        values = torch.cat(batch)
        sizes = [piece.numel() for piece in batch]
        bad = values.isfinite().logical_not_()
        values.masked_fill_(bad, 0.0)
        parts, counts = list(values.split(sizes)), list(bad.to(dtype).split(sizes))
        columns = (
            norms(parts, 2.0, dtype),
            norms(counts, 1.0, dtype),
            norms(parts, math.inf, dtype),
        )
        tables.append(torch.stack([torch.stack(column) for column in columns]))
    of_tensors = torch.cat(tables, dim=1).split([len(some) for some in pieces], dim=1)
    rows = []
    for table in of_tensors:  # [3, pieces]
        norm, count, largest = table.unbind()
        if table.shape[1] == 1:
            rows.append(torch.cat([norm.square(), count, largest]))
        else:
            rows.append(torch.stack([norm.square().sum(), count.sum(), largest.amax()]))
    return rows


def _batches(pieces: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.numel() > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.numel()
    yield batch


def _all_reduce(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., 3]: the first two are added, the last one's maximum is taken."""
    sums, largest = numbers[..., :2].contiguous(), numbers[..., 2:].contiguous()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return torch.cat([sums, largest], dim=-1)
