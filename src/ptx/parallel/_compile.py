"""Compile a model unit by unit, so that equal blocks share one graph."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn

from ptx.parallel._blocks import Units
from ptx.parallel._nesting import add_layer

Module = TypeVar("Module", bound=nn.Module)


def apply_compile(
    model: Module, *, units: Units | None = None, **torch_compile_options: Any
) -> Module:
    """Compile units of ``model`` in place by ``torch.compile(..., fullgraph=True)``.

    Units of one class share a graph, however many there are: compiling takes as long for 80 blocks
    as for one. What differs between them must not be read in their forward as a Python number (a
    layer's index, say): each value makes a graph, and torch raises at the 9th.

    Forward hooks of a unit itself run outside the compiled code, as ordinary Python; those of its
    submodules (tensor parallelism's) are compiled. With `apply_ac` on the same unit, in either
    order, "full" surrounds the compiled code, and the other modes are compiled with it.

    Args:
        model: Any module, after `apply_tp`, before `apply_fsdp2`.
        units: Names or globs, each match a unit; None: `find_blocks`. Modules of a nested list are
            units of their own.
        torch_compile_options: For ``torch.compile``: ``backend``, ``mode``, ``options``,
            ``dynamic``. ``fullgraph=False`` allows graph breaks.

    Returns:
        The same model. Names, classes and state_dict keys of its modules don't change.

    Raises:
        ValueError: A model that is sharded already; units that match nothing, overlap, are compiled
            already, or lie in a module whose ops a policy of `apply_ac` selects.

    Cost: nothing now. The first forward and the first backward compile, again for each new kind of
    input: with and without gradients, a new shape (then any shape), a new dtype.
    """
    options = {"fullgraph": True, **torch_compile_options}
    add_layer(
        model, units, where="apply_compile", compile=functools.partial(torch.compile, **options)
    )
    return model
