"""Views of a `build_mesh` mesh: who reads which sample, what FSDP shards over, where tokens are summed."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ptx.mesh._mesh import MESH_DIMS


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """1-D dp_replicate x dp_shard: its local rank says which samples to read, its size how many ranks share a batch.

    Ranks that differ in tp, cp or pp only read the same sample (cp ranks then keep their part of the sequence).

    Args:
        mesh: What `build_mesh` returned.

    Cost: creates one process group on the first call for a mesh, none afterwards.
    """
    return _flatten(mesh, ("dp_replicate", "dp_shard"), "data_mesh")


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What `apply_fsdp2` and ``fully_shard`` take: 1-D dp_shard x cp, or 2-D (dp_replicate, dp_shard x cp) for HSDP.

    The 2-D form is returned iff dp_replicate > 1, because ``fully_shard`` reads *any* 2-D mesh as HSDP: replicated over
    the first dim, sharded over the second only.

    Args:
        mesh: What `build_mesh` returned.

    Cost: creates one process group on the first call for a mesh, none afterwards.
    """
    shard = _flatten(mesh, ("dp_shard", "cp"), "fsdp_mesh")
    if mesh["dp_replicate"].size() == 1:
        return shard
    # Slicing a flattened name from the root is deprecated, and nothing public joins two slices (torch 2.13).
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard])


def loss_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """1-D dp_replicate x dp_shard x cp: the ranks that hold different tokens, which FSDP averages gradients over.

    Args:
        mesh: What `build_mesh` returned.

    Cost: creates one process group on the first call for a mesh, none afterwards.
    """
    return _flatten(mesh, ("dp_replicate", "dp_shard", "cp"), "loss_mesh")


def _flatten(mesh: DeviceMesh, dims: tuple[str, ...], where: str) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if missing := [dim for dim in MESH_DIMS if dim not in names]:
        raise ValueError(
            f"{where}: the mesh has dims {names}, without {missing}; pass the whole mesh that build_mesh returned"
        )
    wide = tuple(dim for dim in dims if mesh[dim].size() > 1)
    if len(wide) <= 1:  # the dim's own group serves, no new communicator
        return mesh[wide[0] if wide else "dp_shard"]
    # Private, as there is no public way to flatten (torch 2.13); kept by name in the root mesh, so the name says all.
    return mesh[wide]._flatten("_".join(wide))
