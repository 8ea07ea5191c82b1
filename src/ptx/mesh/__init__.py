"""Meshes of ranks, and the views of them that training code needs."""

from ptx.mesh._mesh import build_mesh as build_mesh
from ptx.mesh._seed import seed_ranks as seed_ranks
from ptx.mesh._views import data_mesh as data_mesh
from ptx.mesh._views import fsdp_mesh as fsdp_mesh
from ptx.mesh._views import loss_mesh as loss_mesh

__all__ = ["build_mesh", "data_mesh", "fsdp_mesh", "loss_mesh", "seed_ranks"]
