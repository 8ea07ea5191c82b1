"""Composable parallelism primitives for PyTorch; see README.md.

Names are resolved on first use (PEP 562): ``torch.distributed``'s parts cost most of a second to import, and a script
that only needs a loss should not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx.mesh import build_mesh as build_mesh
    from ptx.mesh import data_mesh as data_mesh
    from ptx.mesh import fsdp_mesh as fsdp_mesh
    from ptx.mesh import loss_mesh as loss_mesh
    from ptx.mesh import seed_ranks as seed_ranks

_HOME = {
    "ptx.mesh": ("build_mesh", "data_mesh", "fsdp_mesh", "loss_mesh", "seed_ranks"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ptx' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
