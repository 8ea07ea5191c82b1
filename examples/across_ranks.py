"""How a number of each rank is spread over the ranks: the slowest, the fullest, the mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist


def across_ranks(
    metrics: Mapping[str, float], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """For a log: ``{"train/dt/min": ..., "/max", "/mean", "/std"}`` of each; {} on one rank.

    For what differs between ranks, as times and memory do; a loss or a norm is one number of the run.

    Args:
        metrics: The same names, in the same order, on every rank.
        device: That the ranks' group communicates from.

    Cost: one all-gather of ``len(metrics)`` float64 (float32 where the device has none), and a wait
    for it. Each rank holds ranks x metrics numbers: 64 kB for 1,024 ranks and 8 metrics.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1 or not metrics:
        return {}
    device = torch.device(device)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    mine = torch.tensor(list(metrics.values()), dtype=dtype, device=device)
    table = mine.new_empty(world, len(mine))
    dist.all_gather(list(table.unbind()), mine)
    spread = {
        "min": table.amin(0),
        "max": table.amax(0),
        "mean": table.mean(0),
        "std": table.std(0, correction=0),
    }
    return {
        f"{name}/{how}": value
        for how, values in spread.items()
        for name, value in zip(metrics, values.tolist())
    }
