"""Give a model built on meta real tensors, with values that don't depend on how it is sharded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptx.parallel import _init_draw
from ptx.parallel._init_place import place, place_problem, placed_buffers, weak_references_dropped
from ptx.parallel._init_run import Slot, joined_name, rehearse, slots_of

M = TypeVar("M", bound=nn.Module)


def materialize(
    model: M,
    device: torch.device | str,
    *,
    seed: SupportsIndex | None,
    init: Callable[[M], object] | None = None,
) -> M:
    """Moves a model from meta to ``device``, in place, with the same initial weights on any mesh.

    The model's own initialisation runs once, unchanged, on stand-ins that show every parameter
    whole and on CPU, however it is sharded. What it does to them is noted, and then repeated on
    each rank's shard. A random fill is drawn in blocks of at most 2**18 elements of the whole
    parameter, each from a stream keyed by (seed, clean name of the parameter, number of the draw,
    number of the block), on CPU, in fp32, then cast. So one seed gives bit-equal full weights on
    every mesh, number of ranks, kind of device and wrapping, and HSDP replicas are equal, whatever
    the ranks' own random states; bf16 draws are the fp32 ones rounded. (torch's CPU kernels draw:
    CPUs with other vector instructions may differ in the last bit.)

    Only what is on meta is filled. Real parameters and buffers keep their values, whatever the
    initialisation would do to them; plain ones that are elsewhere are moved to ``device``. A model
    without meta tensors is therefore moved at most. Parameters keep their identity, ties,
    attributes and hooks; a tied one is keyed by its first name. Buffers come from the
    initialisation as well (computed on CPU, then moved), and equal those of a model that was never
    on meta. torch's random state stays as it was. During the initialisation modules have the
    classes that their author wrote, not FSDP's. All values are made before the model is touched: on
    an error, also for want of memory, it is on meta as it was.

    Args:
        model: Any module, after apply_tp and apply_fsdp2, or torch's own, or none.
        device: Where plain tensors go, and the kind of device the meshes are on. Parameters that
            FSDP offloads go to CPU.
        seed: Any integer, numpy's as well. None, before a load: parameters are allocated and hold
            NaN (integers 0), so that one no load fills shows; buffers are restored.
        init: Called as ``init(model)``. It may use draws, fills and arithmetic with numbers, in
            place, and copies of plain tensors; on whole parameters, slices and transposed views.
            None: ``model.init_weights()`` if there is one; for transformers models, also inside of
            others, their own initialisation; else ``reset_parameters()`` of each submodule,
            children first, a tied parameter by the first module that fills it. A model that
            initialises itself in its constructor (``self.apply(self._init_weights)``, as nanoGPT)
            isn't known by that: pass ``lambda m: m.apply(m._init_weights)``, and add what else the
            constructor fills.

    Returns:
        The same model.

    Raises:
        ValueError: Nothing initialises some parameters or buffers (lists all); the initialisation
            draws outside of parameters, needs whole ones (``orthogonal_``, ``sparse_``, statistics)
            or replaces them; the device doesn't fit a mesh; something holds a view of or a weak
            reference to a parameter; a module with the weight_norm, spectral_norm or pruning of
            torch.nn.utils is on meta. Every rank raises alike.

    Cost: no communication. Memory beyond the shards: a block (1 MiB, up to 5 in a truncated
        normal), and what the initialisation itself allocates. Time to draw 100 M elements on one
        core: normal 0.6 s, uniform 0.4 s, truncated normal 0.8 s. A rank draws the blocks
        that its shard touches: FSDP divides the work, TP over columns and replicas repeat it. With
        seed=None one write of each shard.

    Source: what it guards against: pytorch#140301 (equal shards), torchtitan#4783 (buffers),
        OLMo-core#319 (replicas).
    """
    home, number = _checked(device, seed, init)
    slots = slots_of(model)
    made: dict[int, Tensor] = {}
    buffers: list[tuple[Slot, Tensor]] = []
    with weak_references_dropped(model):
        if homes := _homes(model, slots, home):
            outcome = rehearse(model, number, init, home)
            for parameter, record in outcome.parameters:
                real = torch.empty_like(parameter, device=homes[id(parameter)], requires_grad=False)
                if number is None:
                    _fill_unknown(real)
                else:
                    record.replay(real)
                made[id(parameter)] = real
            buffers = placed_buffers(outcome.buffers, slots, home)
        for tensor in [slot.tensor for slot in slots]:
            if not tensor.is_meta and id(tensor) not in made and _changes(tensor, home):
                made[id(tensor)] = tensor.detach().to(home)
        place(model, made, buffers)  # the model changes from here on, and no sooner
    return model


def _checked(
    device: torch.device | str, seed: object, init: object
) -> tuple[torch.device, int | None]:
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("materialize: device is meta; pass the device to train on")
    if init is not None and not callable(init):
        raise ValueError(f"materialize: init must be a function of the model, got {init!r}")
    device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0"
    return device, None if seed is None else _checked_seed(seed)


def _checked_seed(seed: object) -> int:
    # Keys are made of its digits: numpy's 3 has to be 3. A bool tensor would pass as an int.
    is_bool = isinstance(seed, bool) or getattr(seed, "dtype", None) == torch.bool
    try:
        if not is_bool:
            return operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"materialize: seed must be an int, or None before a load; got {seed!r}")


def _homes(model: nn.Module, slots: list[Slot], device: torch.device) -> dict[int, torch.device]:
    """The id of each meta tensor -> the device it goes to; raises ValueError if one can't go."""
    offloaded = _offloaded(model)
    homes, problems = {}, _computed_attributes(model)
    # Then parameters have views, by what computes the attributes.
    check_uses = not problems and any(_changes(slot.tensor, device) for slot in slots)
    for slot in slots:
        tensor = slot.tensor
        if nn.parameter.is_lazy(tensor):
            problems.append(f"{slot.name}: has no shape yet; run the lazy module once, on meta")
        elif tensor.is_meta:
            homes[id(tensor)] = torch.device("cpu") if id(tensor) in offloaded else device
            if problem := _init_draw.shard_problem(tensor):
                problems.append(f"{slot.name}: {problem}")
            elif isinstance(tensor, DTensor) and id(tensor) not in offloaded:
                kind = tensor.device_mesh.device_type
                if kind != device.type:
                    problems.append(f"{slot.name}: its mesh is on {kind}, not on {device}")
        if check_uses and not slot.is_buffer and (problem := place_problem(tensor)):
            problems.append(f"{slot.name}: {problem}")
    if problems:
        raise ValueError("\n- ".join(["materialize: tensors that can't be made real:", *problems]))
    return homes


def _changes(tensor: Tensor, device: torch.device) -> bool:
    return tensor.is_meta or (not isinstance(tensor, DTensor) and tensor.device != device)


def _computed_attributes(model: nn.Module) -> list[str]:
    """Old-style weight_norm, spectral_norm and pruning of parameters on meta."""
    return [
        f"{joined_name(prefix, key)}: not a parameter, {type(hook).__name__} of torch.nn.utils"
        " computes it before each forward; build that module on a real device: real tensors keep"
        " their values"
        for prefix, module in model.named_modules()
        if any(p.is_meta for p in module.parameters(recurse=False))
        for hook in module._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils.")
        # Norms have the one, pruning the other; neither is public.
        if (key := getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
    ]


def _offloaded(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP keeps on CPU, whatever its mesh is on."""
    found = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Nothing public tells (torch 2.13; before, a module had one group).
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                parameters = group.fsdp_params if group else []
                found |= {id(p.sharded_param) for p in parameters if p.offload_to_cpu}
    return found


def _fill_unknown(parameter: Tensor) -> None:
    local, _ = _init_draw.shard_of(parameter)
    with torch.no_grad():
        local.fill_(float("nan") if local.is_floating_point() else 0)
