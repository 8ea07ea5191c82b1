"""Ask a policy op by op what to save, and take back what can't be saved rightly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ptx.parallel._op_memory import (
    WrittenInputs,
    argument_of,
    is_mutable,
    memory_of,
    written_by,
)

Policy = Callable[..., CheckpointPolicy]  # (ctx, op, *args, **kwargs), as torch calls it

# Their outputs share the memory of their input, and not its count of in-place changes.
UNSAFE_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
REFUSED_COMPILED = (
    "apply_ac: code that is compiled with its recomputation changes in place what it was given or has"
    " as a buffer, and uses it too: it would be recomputed from the changed one; checkpoint the whole"
    ' compiled unit by "full", or don\'t compile it'
)
# What torch 2.13 notes in place of an output that isn't saved.
_RECOMPUTE = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def saving_contexts(policy: Policy, tp: bool) -> tuple[Any, Any]:
    """The contexts of a unit's forward and of its recomputation, for ``checkpoint(context_fn=)``.

    Args:
        policy: What to save. A ``copy.copy`` of it is asked.
        tp: Whether the unit has DTensors.
    """
    saved = _SavedOps(copy.copy(policy), tp)
    forward, recompute = create_selective_checkpoint_contexts(saved)
    saved.storage = forward.storage
    return forward, recompute


class _SavedOps:
    """A policy whose choices can be carried out.

    An op that changes a tensor in place is recomputed, and so is what was saved of that tensor: in a
    saved output the change would be missing, or there too early. A random op that was saved is
    recomputed once another one is, as that draws what follows the first one's numbers.
    """

    def __init__(self, policy: Policy, tp: bool) -> None:
        self.policy = policy
        self.tp = tp
        self.storage: dict[Any, dict[int, Any]] = {}  # by op and call: outputs, or _RECOMPUTE
        self.memory: set[int] = set()  # of what is saved
        self.random: set[Any] = set()  # random ops of which something is saved
        self.inputs = WrittenInputs()

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        choice = self.policy(ctx, op, *args, **kwargs)
        if not isinstance(choice, CheckpointPolicy | bool):
            raise ValueError(
                f"apply_ac: the policy returned {choice!r} for {op}, it must return a CheckpointPolicy"
            )
        random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        if torch.compiler.is_compiling():
            if self.inputs.note(op, args, kwargs, ctx.op_output):
                raise ValueError(REFUSED_COMPILED)
            # A random op that is recomputed passes a generator's state on to the compiled backward,
            # behind the DeviceMesh of the DTensors, where torch 2.13 expects the mesh: an
            # AssertionError.
            return CheckpointPolicy.MUST_SAVE if random and self.tp else choice
        if is_mutable(op):
            choice = CheckpointPolicy.MUST_RECOMPUTE
            if changed := written_by(op, args, kwargs) & self.memory:
                self._drop(lambda _, memory: bool(memory & changed))
        elif op in UNSAFE_VIEWS and memory_of(args[0]) & self.memory:
            choice = CheckpointPolicy.MUST_SAVE  # costs nothing, and torch sees whether it changes
        if choice in _SAVE:
            self.memory |= memory_of(ctx.op_output)
            if random:
                self.random.add(op)
        elif random and self.random and argument_of(op, "dropout_p", args, kwargs) != 0:
            self._drop(lambda earlier, _: earlier in self.random)
            self.random.clear()
        return choice

    def _drop(self, wrong: Callable[[Any, set[int]], bool]) -> None:
        self.memory.clear()
        for op, calls in self.storage.items():
            for call, outputs in calls.items():
                memory = set() if outputs is _RECOMPUTE else memory_of(outputs)
                if memory and wrong(op, memory):
                    calls[call] = _RECOMPUTE
                else:
                    self.memory |= memory
