"""Put real tensors where a model has meta ones, in the same objects, once nothing can fail."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from ptx.parallel import _init_draw
from ptx.parallel._init_run import Slot, slots_of


def place(model: nn.Module, made: dict[int, Tensor], buffers: list[tuple[Slot, Tensor]]) -> None:
    """Give tensors new contents; parameters keep their identity, ties, attributes and hooks.

    Args:
        model: Changed in place.
        made: The id of a tensor of the model -> what it becomes. Emptied.
        buffers: Places of buffers, and what goes there.
    """
    before = [slot.tensor for slot in slots_of(model)]
    kept = [(t, dict(t.__dict__), t._backward_hooks, _after_accumulation(t)) for t in before]
    for slot, tensor in buffers:
        slot.store[slot.key] = tensor
    for old in {id(t): t for t in before if isinstance(t, nn.Parameter)}.values():
        # torch's to_empty makes a new Parameter wherever a plain one is, and so unties them;
        # optimizers built before would keep the old ones.
        if old.is_meta and not isinstance(old, DTensor):
            new = nn.Parameter(made.pop(id(old)), requires_grad=old.requires_grad)
            torch.utils.swap_tensors(old, new)
    if made:

        def new_content(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):  # not held here, as FSDP copies some to pad them
                return made.pop(id(tensor), tensor)
            return made.get(id(tensor), tensor)  # buffers that modules share stay shared

        # What to() and to_empty() are made of: FSDP has its own, which sets its padding up.
        model._apply(new_content)
    for tensor, attributes, hooks, after_accumulation in kept:
        for key, value in attributes.items():
            tensor.__dict__.setdefault(key, value)
        # Set also where they seem to be: torch's swap leaves the dict here and what calls it behind.
        if hooks:
            tensor._backward_hooks = hooks
        if after_accumulation:
            tensor._post_accumulate_grad_hooks = after_accumulation  # type: ignore[assignment]


def placed_buffers(
    finished: list[Slot], before: list[Slot], device: torch.device
) -> list[tuple[Slot, Tensor]]:
    """Buffers that an initialisation left on CPU, on their device and sharded as they were."""
    old = {(id(slot.store), slot.key): slot.tensor for slot in before}
    placed: dict[int, Tensor] = {}
    for slot in finished:
        if id(slot.tensor) not in placed:
            was = old.get((id(slot.store), slot.key))
            placed[id(slot.tensor)] = _placed(slot.tensor, was, device)
    return [(slot, placed[id(slot.tensor)]) for slot in finished]


def place_problem(tensor: Tensor) -> str | None:
    """Why torch can't swap this parameter's contents, and would fail half-way; None: it can."""
    if not _is_swapped(tensor):
        return None
    if weakref.getweakrefs(tensor):
        return "torch can't make it real while there are weak references to it; drop them"
    uses = tensor._use_count()  # type: ignore[attr-defined]  # what torch's swap_tensors looks at
    if uses == 2 and tensor.is_leaf and tensor.requires_grad:
        edge = get_gradient_edge(tensor)  # the node that adds its gradients up may be one of them
        uses = tensor._use_count() - 1  # type: ignore[attr-defined]
        del edge
    if uses > 1:
        return "torch can't make it real while there are views or graphs of it; drop them"
    return None


@contextmanager
def weak_references_dropped(model: nn.Module) -> Iterator[None]:
    """Inside, torch's RNNs have no weak references to parameters that are to be swapped."""
    # As their own _apply does; nothing public does it (torch 2.13).
    rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    rnns = [m for m in rnns if any(map(_is_swapped, m.parameters(recurse=False)))]
    for module in rnns:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in rnns:
            module._init_flat_weights()


def _is_swapped(parameter: Tensor) -> bool:
    return parameter.is_meta or isinstance(parameter, DTensor)  # others are moved


def _after_accumulation(tensor: Tensor) -> object:
    return getattr(tensor, "_post_accumulate_grad_hooks", None)  # no public way to read them


def _placed(full: Tensor, was: Tensor | None, device: torch.device) -> Tensor:
    if not isinstance(was, DTensor):
        return full.to(device)
    made = torch.empty_like(was, device=device)
    local, offsets = _init_draw.shard_of(made)
    region = _init_draw.region_of(torch.empty(full.shape, device="meta"), tuple(full.shape))
    assert region is not None
    _init_draw.copy(local, offsets, region=region, source=full)
    return made
