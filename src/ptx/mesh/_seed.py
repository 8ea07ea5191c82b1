"""Random streams that are equal where ranks hold the same data, and distinct where they don't."""

from __future__ import annotations

from hashlib import blake2b
from operator import index

import torch
from torch.distributed.device_mesh import DeviceMesh


def seed_ranks(mesh: DeviceMesh, seed: int, *, step: int = 0) -> None:
    """Seed torch's generators (CPU and every accelerator) for what a step draws, dropout for instance.

    The seed is a function of ``(seed, step)`` and this rank's coordinates in every dim but tp: ranks of a tp group
    draw the same, as they hold the same activations; pp, dp and cp ranks draw differently. Calling it with the step
    number at the start of each step makes a resumed run draw what the uninterrupted one would have.

    Args:
        mesh: What `build_mesh` returned.
        seed: Any integer, of any integer type.
        step: Likewise.

    Raises:
        TypeError: A seed or step that is no integer, or a bool.

    Cost: no communication.
    """
    names = mesh.mesh_dim_names or ()
    coordinates = [(name, mesh.get_local_rank(name)) for name in names if name != "tp"]
    for value in (seed, step):
        if isinstance(value, bool):
            raise TypeError(f"seed_ranks: {value} is a bool; pass integers")
    # index: a step read from a checkpoint may be numpy's or a tensor, and means the same.
    key = repr((index(seed), index(step), coordinates)).encode()
    torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
