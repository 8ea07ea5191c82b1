"""Accumulate gradients over the micro-batches of one step, communicating once or keeping them sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# Of an FSDP parameter group. torch has setters for them and no getters.
FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "reduce_scatter_unused_params",
)


@contextmanager
def accumulate_grads(
    model: nn.Module | Sequence[nn.Module],
    *,
    last: bool,
    reduce: Literal["last", "every"] = "last",
) -> Iterator[None]:
    """Context for the forward and backward of one micro-batch of a step (of its *window*).

    ::

        for i, (tokens, labels) in enumerate(window):
            with accumulate_grads(model, last=i == len(window) - 1):
                (loss_sum(model(tokens), labels) * scale).backward()
        optimizer.step()

    After the last micro-batch the gradients are those of one backward over the whole window, for
    any number of micro-batches; nothing is divided by that number. Multiply a sum of token losses by
    ``token_scale`` of the list of all labels of the window to weigh each token the same.

    ``reduce="last"`` communicates no gradient before the last micro-batch. Meanwhile every rank
    holds the gradient of each parameter in full (of its tp shard). ``reduce="every"`` adds up shards.

    Parameters that FSDP keeps gathered between forward and backward (``reshard_after_forward=False``)
    stay gathered up to the last backward: one all-gather per window, and no higher peak.

    Between micro-batches gradients are incomplete, partly hidden in FSDP, and in no state dict: clip,
    measure, step, zero and save checkpoints only after the last one.

    If the body raises, the window is void: FSDP's half-done iteration is reset and what it held back
    of the window's gradients is dropped, so after ``optimizer.zero_grad()`` a new window is right.
    On exit the model's flags are what they were on entry.

    Args:
        model: Any module, or a list of parts. What `apply_fsdp2` or ``fully_shard`` wrapped, wholly
            or in parts, and DistributedDataParallel is told what to communicate; under tensor
            parallelism alone, or with plain modules, there is nothing to do.
        last: Whether this is the window's last micro-batch.
        reduce: "last", or "every" to reduce-scatter in each micro-batch (HSDP's all-reduce over
            replicas still comes in the last one).

    Raises:
        ValueError: ``reduce`` is something else.

    Cost, for a window of K micro-batches: "last" holds on each rank parameters / tp gradients of
    MixedPrecisionPolicy's reduce_dtype (param_dtype if that is None; bf16 sums lose bits), and
    reduces once. "every" holds 1 / FSDP ranks of that and reduce-scatters K times; under HSDP it
    gives zeros to parameters that no micro-batch used, where "last" gives them None.

    Source: https://github.com/pytorch/pytorch/pull/125484.
    """
    if reduce not in ("last", "every"):
        raise ValueError(f"accumulate_grads: reduce={reduce!r} must be 'last' or 'every'")
    parts = [model] if isinstance(model, nn.Module) else list(model)
    modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    before = [(vars(group), _flags(group)) for module in sharded for group in _groups(module)]
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel) and reduce == "last" and not last:
                stack.enter_context(module.no_sync())
        try:
            for module in sharded:
                _set_flags(module, last, reduce)
            yield
            if last:
                for module in sharded:
                    _reduce_rest(module)
        except BaseException:
            for module in sharded:
                _drop(module)
            raise
        finally:
            for attributes, flags in before:
                attributes.update(flags)


def _groups(module: FSDPModule) -> list[Any]:
    """The module's parameter groups; private, as all that follows about them."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]  # torch < 2.13


def _flags(group: Any) -> dict[str, bool]:
    return {name: getattr(group, name) for name in FLAGS if hasattr(group, name)}


def _set_flags(module: FSDPModule, last: bool, reduce: str) -> None:
    module.set_requires_gradient_sync(last or reduce == "every", recurse=False)
    module.set_requires_all_reduce(last, recurse=False)
    groups = _groups(module)
    if not last and not any(group._reshard_after_forward for group in groups):
        # The peak is at the end of the forward, where these are gathered in any case.
        module.set_reshard_after_backward(False, recurse=False)
    if reduce == "every" and any(hasattr(g.mesh_info, "replicate_process_group") for g in groups):
        # torch adds up one flat buffer before the all-reduce. Its layout is that of the parameters
        # which had a gradient, so without this a branch not taken would shift or lose the others.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def _reduce_rest(module: FSDPModule) -> None:
    """Reduce what earlier micro-batches left with a module that the last backward didn't reach.

    FSDP does so by itself within one root. Of several, one may have no part in the last micro-batch.
    """
    if any(_is_left(group) for group in _groups(module)):
        # As torch's own pipeline stages do after their last micro-batch.
        module._get_fsdp_state()._root_post_backward_final_callback()


def _is_left(group: Any) -> bool:
    return (
        (group.is_unsharded and group.reshard_after_backward)
        or group._partial_reduce_output is not None
        or any(
            parameter.unsharded_accumulated_grad is not None
            or (
                hasattr(parameter, "_unsharded_param")
                and parameter._unsharded_param.grad is not None
            )
            for parameter in group.fsdp_params
        )
    )


def _drop(module: FSDPModule) -> None:
    """Undo a half-done iteration, and forget gradients that aren't reduced yet.

    torch's reset leaves the latter, which would then be part of the next window.
    """
    state = module._get_fsdp_state()
    if state._is_root and hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    for group in _groups(module):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
