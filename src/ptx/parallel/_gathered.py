"""Free or renew the parameters that FSDP leaves gathered, so that nothing uses them out of date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ptx.parallel._accumulate import _groups


def keep_fresh(
    roots: Iterable[nn.Module],
    kept: Iterable[nn.Module],
    head: Iterable[nn.Module],
    all_groups: Iterable[nn.Module],
) -> None:
    """Register hooks that free or renew what a forward gathers and no backward frees.

    Gathered parameters are copies. Left behind, they hide what is written to the shards, and
    ``parameters()`` returns them, to which writes are lost and from which an optimizer trains nothing.

    After a call without gradients they are freed. Before a forward those that an earlier forward
    left behind are freed if their shards may have changed meanwhile: there are gradients, or a
    version counter moved. The counters alone would not do, as fused and foreach optimizers don't
    move those of a DTensor. Two forwards before a backward, between which nothing changed, gather
    once.

    Args:
        roots: Where a forward enters the model.
        kept: One module of each group that may stay gathered, or sharded over fewer ranks.
        head: All modules of the group that is also called outside the roots; none if there isn't one.
        all_groups: One module of each group. One that trains nothing at first learns its dtypes later.

    Cost: reading a few attributes of each parameter in ``kept`` per forward.
    """
    roots, head = list(dict.fromkeys(roots)), list(head)
    groups = [_Gathered(module) for module in kept]
    everything = [group for m in all_groups if isinstance(m, FSDPModule) for group in _groups(m)]
    head_groups = [group for group in groups if group.module in head]
    running: set[nn.Module] = set()

    def before_root(module: nn.Module, *_: Any) -> None:
        if not running and not _in_backward():
            for group in groups:
                group.renew()
            for each in everything:
                # FSDP reads the dtypes of what trains once, in the first forward. If that was nothing,
                # it may be something now.
                if vars(each).get("_orig_dtype", True) is None:
                    each._init_mp_dtypes()
        running.add(module)

    def after_root(module: nn.Module, *_: Any) -> None:
        running.discard(module)
        settle(groups)

    def before_head(*_: Any) -> None:
        if not running and not _in_backward():
            for group in head_groups:
                group.look()

    def after_head(*_: Any) -> None:
        if torch.is_grad_enabled():
            for group in head_groups:
                group.note_part()
        settle(head_groups)

    def settle(which: list[_Gathered]) -> None:
        # A backward that runs a forward again, without gradients maybe, frees by itself.
        if not running and not torch.is_grad_enabled() and not _in_backward():
            for group in which:
                group.free()

    for module in roots:
        module.register_forward_pre_hook(before_root, prepend=True)  # before FSDP gathers
        module.register_forward_hook(after_root, always_call=True)  # if it raises, too
    for module in head:
        if module not in roots:
            module.register_forward_pre_hook(before_head, prepend=True)
            module.register_forward_hook(after_head)


class _Gathered:
    """One FSDP group, and what its shards were when it was gathered. All of FSDP's part is private."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        self.module = module
        self.state: Any = module._get_fsdp_state()
        self.groups = _groups(module)
        self.seen: tuple[bool, int] | None = None
        self.in_part = False  # a backward may come that trusts that this is still gathered

    def look(self) -> None:
        """Remember the shards, if this is about to be gathered from them."""
        if all(group.is_sharded for group in self.groups):
            self.seen = self._shards()
            self.in_part = False

    def note_part(self) -> None:
        # Of a group of several modules some were called. FSDP then has the backward gather nothing.
        self.in_part |= bool(self.state._modules_to_run_forward)

    def renew(self) -> None:
        # What calls were recorded is cleared by a backward; accumulate_grads keeps after a backward.
        left = bool(self.state._modules_to_run_forward) or any(
            group._post_forward_indices for group in self.groups
        )
        self._end_pass()
        if left and self._may_have_changed():
            self._free()
            if self.in_part:
                module: Any = self.module
                # Async means on the stream in which the optimizer wrote, and so after it.
                module.unshard(async_op=True).wait()
                self.seen = self._shards()
        self.look()

    def free(self) -> None:
        if not self.in_part:
            self._end_pass()
            self._free()

    def _free(self) -> None:
        # reshard() may do nothing or half of it, depending on flags and on what ran last.
        for group in self.groups:
            group._to_sharded()

    def _end_pass(self) -> None:
        """Have FSDP not wait for modules of the group that weren't called; a backward does the same."""
        if self.state._modules_to_run_forward:
            self.state._modules_to_run_forward.clear()
            for each in (self.state, *self.groups):
                each._training_state = type(each._training_state).IDLE
            if self.state._state_ctx.iter_forward_root is self.state:
                self.state._state_ctx.iter_forward_root = None

    def _may_have_changed(self) -> bool:
        now = self._shards()
        return now != self.seen or now[0]

    def _shards(self) -> tuple[bool, int]:
        shards: list[Any] = [p.sharded_param for group in self.groups for p in group.fsdp_params]
        return (
            any(shard.grad is not None for shard in shards),
            sum(_version(shard) + _version(shard._local_tensor) for shard in shards),
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # private; nothing public tells
