"""What ranks have to agree on once, before the first step: all of them go on, or all raise."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def of_first_rank(make: Callable[[], T]) -> T:
    """Calls ``make`` on rank 0 alone; every rank returns its result, or raises its error.

    Cost: one broadcast of a pickled object. Without a process group it is a plain call.

    Raises:
        ValueError: With rank 0's message, on the others.
    """
    if not dist.is_initialized():
        return make()
    made: list[Any] = [None, None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except Exception as error:
            failed, made[1] = error, f"{error}"
    dist.broadcast_object_list(made)
    if failed is not None:
        raise failed
    if made[1] is not None:
        raise ValueError(made[1])
    result: T = made[0]
    return result


def on_every_rank(make: Callable[[], T], identity: Callable[[T], str]) -> T:
    """Calls ``make`` on each rank, and raises on all if it fails on one or the results differ.

    Cost: one all-gather of a pickled pair of strings.

    Args:
        make: May take long, and communicate nothing.
        identity: What has to be equal on all ranks.

    Raises:
        ValueError: Another rank failed (its message), or has something else.
    """
    if not dist.is_initialized():
        return make()
    name = problem = ""
    failed: Exception | None = None
    try:
        result = make()
        name = identity(result)
    except Exception as error:
        failed, problem = error, f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), name, problem))
    if failed is not None:
        raise failed
    for rank, (host, other, said) in enumerate(everyone):
        if said:
            raise ValueError(f"rank {rank} on {host}: {said}")
        if other != everyone[0][1]:
            raise ValueError(
                f"rank {rank} on {host} has other data than rank 0 on {everyone[0][0]}"
                f" ({other!r}, not {everyone[0][1]!r}); give every host the same files"
            )
    return result
