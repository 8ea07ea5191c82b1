"""Recompute activations in the backward instead of keeping them: whole units, or op by op."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ptx.parallel._blocks import Units
from ptx.parallel._nesting import Forward, add_layer
from ptx.parallel._order import is_tp

Module = TypeVar("Module", bound=nn.Module)
Policy = Callable[..., CheckpointPolicy]  # (ctx, op, *args, **kwargs), as torch calls it

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

    Random numbers are the same when recomputed. Forward hooks of a unit itself run outside: what
    they return is kept, nothing of them is repeated. With `apply_compile` on the same unit, in
    either order, "full" surrounds the compiled code, and the other modes are compiled with it.

    Args:
        model: Any module, after `apply_tp`, before `apply_fsdp2`.
        mode: "full", "selective", or a policy.
        units: Names or globs, each match a unit; None: `find_blocks`. Modules of a nested list are
            units of their own.

    Returns:
        The same model. Names, classes and state_dict keys of its modules don't change.

    Raises:
        ValueError: An unknown mode; a model that is sharded already; units that match nothing,
            overlap, are checkpointed already, or (but for "full") hold modules that are compiled
            by themselves. When the model runs: a unit called with a key/value cache, to which
            recomputing would append once more.

    Cost: "full" one more forward of the units. "selective" about half of their matrix products
    and the element-wise ops. A unit can be differentiated twice (``retain_graph``) only in "full".

    Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198 (selective).
    """
    where = "apply_ac"
    if mode not in ("full", "selective") and not callable(mode):
        raise ValueError(
            f"{where}: mode must be 'full', 'selective' or a policy (ctx, op, *args, **kwargs) ->"
            f" CheckpointPolicy, got {mode!r}"
        )
    by_op = mode != "full"
    options = {}
    if by_op:
        policy = SelectivePolicy() if isinstance(mode, str) else mode
        # One object for all units: compiled code isn't shared with units that have another.
        options["context_fn"] = functools.partial(_fresh_contexts, policy, is_tp(model))
    layer = functools.partial(_recomputed, options=options)
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


def _fresh_contexts(policy: Policy, is_tp: bool) -> Any:
    policy = copy.copy(policy)
    return create_selective_checkpoint_contexts(_keep_random(policy) if is_tp else policy)


def _keep_random(policy: Policy) -> Policy:
    # Compiled code that recomputes a random op passes a generator's state on to its backward, behind
    # the DeviceMesh of the DTensors, where torch 2.13 expects the mesh: an AssertionError.
    def keep(
        ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        choice = policy(ctx, op, *args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        return CheckpointPolicy.MUST_SAVE if random and torch.compiler.is_compiling() else choice

    return keep


def _recomputed(forward: Forward, options: dict[str, Any]) -> Forward:
    @functools.wraps(forward, updated=())
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_cache(self, args, kwargs)
        # Keywords go into the function, as checkpoint has some of its own.
        call = functools.partial(forward, self, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **options)

    return recomputed


def _refuse_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):
        raise ValueError(
            f"apply_ac: {type(module).__name__} was called with a key/value cache, to which"
            " recomputing it would append once more; pass use_cache=False, or set it in model.config"
        )
