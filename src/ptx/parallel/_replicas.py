"""Check that ranks which should hold the same parameters and buffers do, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptx._names import clean_name

WORDS = 2**18  # of 4 bytes, that are multiplied by as many fixed weights at once
FACTOR = 6364136223846793005  # between chunks, so that their order counts; Knuth's MMIX


@torch.no_grad()
def assert_replicas_equal(model: nn.Module | Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Raise on all ranks if replicas of a parameter or buffer differ in any bit along ``mesh``.

    Each tensor is compared between the ranks of a mesh dim that hold the same shard of it: a plain
    tensor between all of them; a DTensor between those with the same coordinates in the dims that
    shard it. So with ``mesh["dp_replicate"]`` every shard is compared between HSDP's replicas, with
    ``mesh["tp"]`` what tensor parallelism leaves whole (norms), and with the whole mesh all that has
    replicas anywhere. A dim called "pp" is left out, as stages hold different parts.

    Args:
        model: Any module, or a list of parts, between backward and the next forward.
        mesh: Any dims of any mesh. Every rank of the world calls this, with the same dims.

    Raises:
        AssertionError: On every rank: the first tensor that differs, the ranks that disagree, and
            how many more tensors do. Values are compared as bits: NaNs of the same bits are equal,
            0.0 and -0.0 aren't.
        ValueError: A parameter or buffer is on meta (on some ranks only: AssertionError).

    Cost: one read of all local tensors; per mesh dim an all-gather of two integers and one of two
    for each tensor; an all-reduce of one flag over all ranks. Waits for the device. Checksums have 64
    bits: a change within 4 aligned bytes is always seen, another is missed with a chance of 2^-33.

    Source: what goes unseen otherwise: https://github.com/allenai/OLMo-core/pull/319.
    """
    tensors = _named_tensors(model)
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1 and names[dim] != "pp"]
    if dims:
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        table = _table([tensor for _, tensor in tensors], device)
        kinds = [f"{name!r} {_kind(tensor)}" for name, tensor in tensors]
        found = [_compare(kinds, table, mesh.get_group(dim), names[dim]) for dim in dims]
        _raise_together(next((text for text in found if text), ""), device)
    # Not before: were it so on some ranks only, the others would wait for them.
    if meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise ValueError(
            f"assert_replicas_equal: {meta[0]!r} (of {len(meta)} tensors) is on meta; call materialize"
            " first"
        )


def _named_tensors(model: nn.Module | Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    parts = [model] if isinstance(model, nn.Module) else list(model)
    named = [pair for part in parts for pair in (*part.named_parameters(), *part.named_buffers())]
    return [(clean_name(name), tensor) for name, tensor in named]


def _raise_together(mine: str, device: torch.device) -> None:
    """Only some groups saw it. If their ranks alone raised, the others would wait for them for ever."""
    failed = torch.tensor(int(bool(mine)), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed:
        texts = [""] * dist.get_world_size()
        dist.all_gather_object(texts, mine)
        raise AssertionError("assert_replicas_equal: " + next(text for text in texts if text))


def _kind(tensor: Tensor) -> str:
    meta = " on meta" if tensor.is_meta else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{meta}"


def _table(tensors: list[Tensor], device: torch.device) -> Tensor:
    """[n, 2], int64: which shard it is, and a checksum of this rank's bits of it."""
    weights: dict[torch.device, Tensor] = {}
    rows = [torch.zeros(0, 2, dtype=torch.int64, device=device)]
    for tensor in tensors:
        if tensor.is_meta:
            rows.append(torch.zeros(1, 2, dtype=torch.int64, device=device))
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device not in weights:
            weights[local.device] = _random_odd(WORDS).to(local.device)
        checksum = _checksum(local.detach(), weights[local.device]).to(device)
        rows.append(torch.stack([torch.full_like(checksum, _shard_of(tensor)), checksum])[None])
    return torch.cat(rows)


def _shard_of(tensor: Tensor) -> int:
    """Numbers the shards of a DTensor; equal on ranks that hold the same one."""
    number = 0
    if isinstance(tensor, DTensor) and (coordinate := tensor.device_mesh.get_coordinate()):
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                number = number * tensor.device_mesh.size(dim) + coordinate[dim]
    return number


def _random_odd(size: int) -> Tensor:
    """Weights of 64 bits, equal on all ranks; odd, so that no single change is multiplied to 0."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator) | 1


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    """0-dim int64: the bits as words of 4 bytes, times weights of 8, added modulo 2^64.

    Words as wide as the weights would not do: two changed top bits would cancel.
    """
    tensor = tensor.to_dense().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in data.split(4 * WORDS):
        # A copy: a shard may start anywhere, words start at multiples of 4.
        words = torch.zeros(-(-part.numel() // 4), dtype=torch.int32, device=data.device)
        words.view(torch.uint8)[: part.numel()] = part
        total = total * FACTOR + (words * weights[: words.numel()]).sum()
    return total


def _compare(kinds: list[str], table: Tensor, group: dist.ProcessGroup, dim: str) -> str:
    """What differs between the ranks of ``group``, in words; the same on all of them."""
    ranks = dist.get_process_group_ranks(group)
    digest = blake2b("\n".join(kinds).encode(), digest_size=7).digest()
    kind = torch.tensor([len(kinds), int.from_bytes(digest)], device=table.device)
    if any(other != kind.tolist() for other in _gather(kind, group)):
        every: list[list[str]] = [[]] * len(ranks)
        dist.all_gather_object(every, kinds, group=group)
        return _other_tensors(every, ranks, dim)

    tables = _gather(table, group)
    differing = []
    for i, kind_of_tensor in enumerate(kinds):
        first: dict[int, int] = {}  # place in the group, by shard
        apart: dict[int, list[int]] = {}  # ranks, by the one that they disagree with
        for place, rows in enumerate(tables):
            shard, checksum = rows[i]
            other = first.setdefault(shard, place)
            if checksum != tables[other][i][1]:
                apart.setdefault(ranks[other], []).append(ranks[place])
        if apart:
            than = ", ".join(f"ranks {some} than rank {rank}" for rank, some in apart.items())
            differing.append(f"{kind_of_tensor} has other bits over {dim!r} on {than}")
    more = f"; so have {len(differing) - 1} more of {len(kinds)} tensors" if differing[1:] else ""
    return differing[0] + more if differing else ""


def _other_tensors(every: list[list[str]], ranks: list[int], dim: str) -> str:
    for rank, kinds in zip(ranks, every):
        odd = sorted(set(kinds) ^ set(every[0]), key=lambda kind: (not kind.endswith("meta"), kind))
        if odd:
            where = rank if odd[0] in kinds else ranks[0]
            return f"{odd[0]} is on rank {where} and not on both of ranks {[ranks[0], rank]} of {dim!r}"
    return f"the ranks {ranks} of {dim!r} hold the same tensors in another order"


def _gather(numbers: Tensor, group: dist.ProcessGroup) -> list[Any]:
    """``numbers`` of each rank, as nested lists."""
    gathered = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(gathered, numbers, group=group)
    return [one.tolist() for one in gathered]
