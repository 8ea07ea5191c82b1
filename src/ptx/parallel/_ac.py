"""Recompute activations in the backward instead of keeping them: whole units, or op by op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
)

from ptx.parallel._blocks import Units
from ptx.parallel._nesting import Forward, add_layer
from ptx.parallel._order import is_tp, require_before
from ptx.parallel._recompute import Rerun
from ptx.parallel._saved_ops import Policy, saving_contexts

Module = TypeVar("Module", bound=nn.Module)
Contexts = Callable[[], tuple[Any, Any]]  # of a forward, and of its recomputation

# Matrix products with weights. Batched ones (bmm) are not among them: attention that is written out
# makes its scores by them, [heads, S, S] each.
_MATMULS = frozenset(
    "aten::" + name
    for name in (
        "mm",
        "addmm",
        "_addmm_activation",
        "_scaled_mm",
        "_scaled_mm_v2",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
    )
)
# Sums over ranks. Each is as small as the stream between blocks, and recomputing it communicates.
_SUMS = frozenset({"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"})


def apply_ac(
    model: Module,
    mode: Literal["full", "selective"] | Policy,
    *,
    units: Units | None = None,
) -> Module:
    """Checkpoint units of ``model`` in place: keep their inputs, recompute the rest in the backward.

    "full" keeps nothing else. "selective" also keeps outputs of these ops, and recomputes all else:

    - every attention kernel: an op with "attention" or "attn" in its name, as all backends of
      ``F.scaled_dot_product_attention`` have, ``flex_attention`` and flash-attn's ops;
    - the 2nd, 4th, 6th ... matrix product with a weight in each call of the unit (mm, addmm, and
      their scaled and grouped forms; not bmm, the product inside of attention that is written out);
    - every reduce-scatter and all-reduce of tensor parallelism.

    A policy is what ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes: called
    as ``policy(ctx, op, *args, **kwargs)`` for each op of a unit, it returns a ``CheckpointPolicy``.
    Each call of a unit asks a ``copy.copy`` of it, so an object that counts in attributes starts
    anew.

    What a unit is recomputed from is as it was at its forward: arguments, small buffers, attributes
    and random numbers. What the forward changes of them (a BatchNorm's statistics) it changes once.
    Forward hooks of a unit itself run outside: what they return is kept, nothing of them is
    repeated. With `apply_compile` on the same unit, in either order, "full" surrounds the compiled
    code, and the other modes are compiled with it. A model that is pickled loses both.

    Args:
        model: Any module, after `apply_tp`, before `apply_fsdp2`.
        mode: "full", "selective", or a policy.
        units: Names or globs, each match a unit; None: `find_blocks`. Modules of a nested list are
            units of their own.

    Returns:
        The same model. Names, classes and state_dict keys of its modules don't change.

    Raises:
        ValueError: An unknown mode; a model that is sharded already; units that match nothing,
            overlap, are checkpointed already, by transformers or torch too, or (but for "full") hold
            modules that are compiled by themselves. When the model runs: a unit called with an
            iterator, or with a key/value cache, to which recomputing would append once more; one
            that changes in place an argument, a parameter, or a buffer of more than 64 KiB; a
            parameter that changes before the backward; a policy that returns no
            ``CheckpointPolicy``.

    Cost: "full" one more forward of the units. "selective" about half of their matrix products
    and the element-wise ops. Buffers of up to 64 KiB are copied in each forward. A unit can be
    differentiated twice (``retain_graph``) only in "full".

    Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198 (selective).
    """
    where = "apply_ac"
    require_before(where, model, "apply_fsdp2")
    if mode not in ("full", "selective") and (isinstance(mode, type) or not callable(mode)):
        raise ValueError(
            f"{where}: mode must be 'full', 'selective' or a policy (ctx, op, *args, **kwargs) ->"
            f" CheckpointPolicy, got {mode!r}"
        )
    tp = is_tp(model)
    contexts: Contexts
    # Code that is compiled with it is shared between units, and models, that have the same object.
    if mode == "full":
        contexts = _keep_nothing
    elif mode == "selective":
        contexts = _keep_selected_tp if tp else _keep_selected
    else:
        contexts = functools.partial(saving_contexts, mode, tp)
    by_op = mode != "full"
    layer = functools.partial(_recomputed, contexts=contexts, by_op=by_op)
    add_layer(model, units, where=where, recompute=layer, by_op=by_op)
    return model


class SelectivePolicy:
    """The "selective" mode of `apply_ac`; stateful, so a copy serves each call of a unit.

    Args:
        every: The output of each ``every``-th matrix product with a weight is saved.
    """

    def __init__(self, every: int = 2) -> None:
        self.every = every
        self.matmuls = 0

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Whether to save the output of ``op``, an OpOverload or HigherOrderOperator."""
        name = op.name().partition(".")[0]  # without the overload
        save = "attention" in name or "attn" in name or name in _SUMS
        if name in _MATMULS:
            self.matmuls += 1
            save = self.matmuls % self.every == 0
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing() -> tuple[Any, Any]:
    return saving_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE, tp=False)


def _keep_selected() -> tuple[Any, Any]:
    return saving_contexts(SelectivePolicy(), tp=False)


def _keep_selected_tp() -> tuple[Any, Any]:
    return saving_contexts(SelectivePolicy(), tp=True)


def _recomputed(forward: Forward, contexts: Contexts, by_op: bool) -> Forward:
    options: dict[str, Any] = {"context_fn": contexts} if by_op else {}  # "full" has no use for it

    @functools.wraps(forward, updated=())
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_what_is_used_up(self, args, kwargs)
        if torch.compiler.is_compiling():
            # Keywords go into the function, as checkpoint has some of its own.
            call = functools.partial(forward, self, **kwargs)
            return checkpoint(call, *args, use_reentrant=False, context_fn=contexts)
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        rerun = Rerun(forward, self, args, kwargs, by_op=by_op)
        output = checkpoint(rerun, *rerun.leaves, use_reentrant=False, **options)
        rerun.finish()
        return output

    return recomputed


def _refuse_what_is_used_up(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = [*args, *kwargs.values()]
    if not torch.compiler.is_compiling():
        given += tree_leaves((args, kwargs))
    # Dynamo can't ask a number that changes between calls for its attributes.
    given = [value for value in given if not isinstance(value, int | float)]
    if any(hasattr(value, "__next__") for value in given):
        raise ValueError(
            f"apply_ac: {type(module).__name__} was called with an iterator, of which recomputing"
            " would get what comes next; pass a list"
        )
    if any(hasattr(value, "get_seq_length") for value in given):
        raise ValueError(
            f"apply_ac: {type(module).__name__} was called with a key/value cache, to which"
            " recomputing it would append once more; pass use_cache=False, or set it in model.config"
        )
