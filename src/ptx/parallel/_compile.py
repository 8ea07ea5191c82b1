"""Compile a model unit by unit, so that equal blocks share one graph."""

from __future__ import annotations

import functools
import re
from typing import Any, TypeVar

import torch
from torch import nn

from ptx.parallel._blocks import Units
from ptx.parallel._nesting import Forward, add_layer
from ptx.parallel._saved_ops import REFUSED_COMPILED

Module = TypeVar("Module", bound=nn.Module)


def apply_compile(
    model: Module, *, units: Units | None = None, **torch_compile_options: Any
) -> Module:
    """Compile units of ``model`` in place by ``torch.compile(..., fullgraph=True)``.

    Units of one class share a graph, however many there are: compiling takes as long for 80 blocks
    as for one. What differs between them must not be read in their forward as a Python number (a
    layer's index, say): each value makes a graph, and torch raises at the 9th.

    Hooks of a unit itself run outside the compiled code, as ordinary Python; forward hooks of its
    submodules (tensor parallelism's) are compiled, those that are there at each call. With
    `apply_ac` on the same unit, in either order, "full" surrounds the compiled code, and the other
    modes are compiled with it.

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
            already, or lie in a module whose ops a policy of `apply_ac` selects. When the model runs:
            a backward hook on a submodule of a unit; a forward, compiled with its recomputation,
            that sets attributes, or changes an input or a buffer in place and uses it too.

    Cost: nothing now. The first forward and the first backward compile, again for each new kind of
    input: with and without gradients, a new shape (then any shape), a new dtype.
    """
    options = {"fullgraph": True, **torch_compile_options}
    layer = functools.partial(_compiled, options=options)
    add_layer(model, units, where="apply_compile", compile=layer)
    return model


def _compiled(forward: Forward, options: dict[str, Any]) -> Forward:
    from torch._dynamo import config  # slow to import
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported

    code = torch.compile(forward, **options)

    @functools.wraps(forward, updated=())
    def compiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of something larger
            return code(self, *args, **kwargs)
        # Dynamo takes it that hooks never change and are the same in all units, unless told not to.
        skip = config.skip_nnmodule_hook_guards
        config.skip_nnmodule_hook_guards = False
        try:
            return code(self, *args, **kwargs)
        except (Unsupported, BackendCompilerFailed) as error:
            if problem := _known_problem(error):
                raise ValueError(problem) from error
            raise
        finally:
            config.skip_nnmodule_hook_guards = skip

    return compiled


def _known_problem(error: Exception) -> str | None:
    message = str(error)
    if REFUSED_COMPILED in message:
        return REFUSED_COMPILED
    if re.match("HOP: .* side effect", message):
        return (
            "apply_compile: the forward of a unit changes an attribute, a buffer or a container, which it"
            " can't in code that is compiled with its recomputation; checkpoint the whole compiled unit"
            ' by "full", or don\'t compile it'
        )
    if "Module-level backwards hooks" in message:
        return (
            "apply_compile: a submodule of a unit has a backward hook, which can't be compiled; put it"
            " on the unit itself, or on the tensors it is about"
        )
    return None
