"""Build the one mesh that every other function takes its dims from."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH_DIMS = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
)  # outer to inner: tp ranks are neighbours


def build_mesh(
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    tp: int = 1,
    device_type: str | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """A 5-D mesh over all ranks; every dim exists, with size 1 where it isn't used.

    Initialises torch.distributed if nobody did: from torchrun's variables, else as a world of one, so that the same
    script runs under ``torchrun`` and as ``python script.py``. On an accelerator the device is set from ``LOCAL_RANK``
    first, and the group is composite (``cuda:nccl,cpu:gloo``), so that CPU tensors can be communicated too.

    Args:
        pp: Pipeline stages.
        dp_replicate: Groups that hold a full (sharded) copy each; gradients are all-reduced over them (HSDP).
        dp_shard: Ranks that share one copy of the parameters (FSDP).
        cp: Ranks that share one sequence.
        tp: Ranks that share each matrix. One of the five may be -1: it takes the ranks that are left.
        device_type: "cpu", "cuda", ...; None: the accelerator if there is one.
        timeout: Of collectives, if the group is initialised here; None: torch's default.

    Returns:
        A plain DeviceMesh with dims ``("pp", "dp_replicate", "dp_shard", "cp", "tp")``, to be sliced: ``mesh["tp"]``.

    Raises:
        ValueError: A degree that is no integer or below 1, two that are -1, or a product that isn't the world size.

    Cost: one process group per dim and rank, no communication of tensors.
    """
    degrees = dict(zip(MESH_DIMS, (pp, dp_replicate, dp_shard, cp, tp)))
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator else "cpu"
    # Sizes are checked against the launcher's count first: an error should not leave a group behind.
    world_size = dist.get_world_size() if dist.is_initialized() else _launched_world_size()
    shape = resolve_degrees(degrees, world_size)
    if not dist.is_initialized():
        _init_process_group(device_type, timeout)
    return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIMS)


def resolve_degrees(degrees: dict[str, int], world_size: int) -> tuple[int, ...]:
    """The size of each dim, -1 replaced; raises ValueError as `build_mesh` says."""
    given = ", ".join(f"{name}={degree!r}" for name, degree in degrees.items())
    if any(not isinstance(d, int) or isinstance(d, bool) for d in degrees.values()):
        raise ValueError(f"build_mesh: degrees must be integers; got {given}")
    free = [name for name, degree in degrees.items() if degree == -1]
    wrong = [name for name, degree in degrees.items() if degree < 1 and degree != -1]
    if wrong:
        raise ValueError(
            f"build_mesh: {', '.join(wrong)} must be positive, or -1 for the rest; got {given}"
        )
    if len(free) > 1:
        raise ValueError(f"build_mesh: only one dim can take the rest (-1), got {given}")
    fixed = prod(degree for degree in degrees.values() if degree != -1)
    rest, remainder = divmod(world_size, fixed)
    if remainder or not rest or (not free and rest != 1):
        raise ValueError(
            f"build_mesh: {given} needs {'a multiple of ' if free else ''}{fixed} ranks, the world has"
            f" {world_size}; {_working_product(degrees, world_size)} would work"
        )
    return tuple(rest if degree == -1 else degree for degree in degrees.values())


def _working_product(degrees: dict[str, int], world_size: int) -> str:
    # Keep the inner degrees as far as they divide the world, and let dp_shard take the rest.
    fit, left = {}, world_size
    for name in ("tp", "cp", "pp", "dp_replicate"):
        wanted = max(degrees[name], 1)
        fit[name] = max(d for d in range(1, wanted + 1) if left % d == 0)
        left //= fit[name]
    fit["dp_shard"] = left
    return ", ".join(f"{name}={fit[name]}" for name in degrees)


def _launched_world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if _launched() else 1


def _launched() -> bool:
    """Whether torchrun, or anything that sets its variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _init_process_group(device_type: str, timeout: timedelta | None) -> None:
    backend = "gloo"
    if device_type != "cpu":
        # Before the group: NCCL binds its communicators to the current device.
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        backend = f"{device_type}:{dist.get_default_backend_for_device(device_type)},cpu:gloo"
    if _launched():
        store = _store_of_restart()
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            rank, size = int(os.environ["RANK"]), _launched_world_size()
            dist.init_process_group(
                backend, timeout=timeout, store=store, rank=rank, world_size=size
            )
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not declared so
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    atexit.register(_destroy_process_group)  # NCCL warns at exit about a group that is left


def _store_of_restart() -> Any:
    """A part of torchrun's store that only this attempt writes to; None before any restart.

    torchrun --max-restarts keeps one store for all attempts, in which gloo then finds the addresses of
    the ranks that died, and every restart fails. Between several nodes there is no number that all
    of them agree on, so there it stays torch's own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return None
    store, *_ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A mesh that is still referred to keeps gloo's threads, which may be about to let go of the last tensors. A thread
    # that needs Python for that once the interpreter is ending aborts the process (pytorch#179291), and there is
    # nothing to wait on; a barrier would wait for ranks that are gone.
    time.sleep(0.1)
