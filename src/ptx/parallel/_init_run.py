"""Run a model's initialisation on stand-ins, and take from it what it does and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ptx._names import clean_name
from ptx.parallel._init_classes import original_classes
from ptx.parallel._init_record import Record, StandIn, stand_in_for, trunc_normal_recorded
from ptx.parallel._init_watch import Scratch, Watch, storage_id

M = TypeVar("M", bound=nn.Module)
Store = dict[str, Any]  # name -> Tensor or None

_SHOWN = 20  # lines in one error


@dataclass(frozen=True)
class Slot:
    """A place in a module where a tensor is; a tied tensor has several."""

    name: str  # in the model, without wrapper prefixes
    store: Store  # its module's _parameters or _buffers
    key: str
    tensor: Tensor
    is_buffer: bool


@dataclass(frozen=True)
class Outcome:
    """What an initialisation does: a record for each meta parameter, and finished buffers.

    Buffers are those that were on meta, on CPU now, and those that it registered.
    """

    parameters: list[tuple[Tensor, Record]]
    buffers: list[Slot]


def slots_of(model: nn.Module) -> list[Slot]:
    """Every place of a parameter or buffer, in ``named_parameters`` order."""
    slots = []
    for prefix, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    name = joined_name(prefix, key)
                    slots.append(Slot(name, store, key, tensor, store is module._buffers))
    return slots


def joined_name(prefix: str, key: str) -> str:
    """The name in a model of what its module ``prefix`` calls ``key``, without wrappers."""
    return clean_name(f"{prefix}.{key}" if prefix else key)


def rehearse(
    model: M, seed: int | None, init: Callable[[M], object] | None, device: torch.device
) -> Outcome:
    """Run the initialisation without touching the model's own tensors, nor torch's random state.

    Raises:
        ValueError: As `ptx.materialize` says; the model is as it was.
    """
    slots = slots_of(model)
    stand_ins: dict[int, Tensor] = {}
    records: dict[int, Record] = {}
    scratches: dict[int, Scratch] = {}
    for slot in slots:
        at = id(slot.tensor)
        if at in stand_ins:  # tied: the first name is the key
            continue
        if slot.is_buffer:
            scratches[at] = Scratch(slot.name, slot.tensor)
            stand_ins[at] = scratches[at].tensor
        else:
            records[at] = Record(slot.name, tuple(slot.tensor.shape), seed)
            stand_ins[at] = stand_in_for(records[at], slot.tensor)
    with _replaced(model, slots, stand_ins):
        with (
            original_classes(model),
            _random_state_kept(device),
            torch.no_grad(),
            torch.device("cpu"),  # whatever default device the caller set
            trunc_normal_recorded(),
            Watch(list(scratches.values()), seed),
        ):
            _initialise(model, init, _unfinished(model, slots, buffers_only=seed is None))
        for record in records.values():
            record.open = False
        now = slots_of(model)
        problems = _changed(slots, now, stand_ins) + _unreal_attributes(model)
        problems += _unwritten(slots, now, scratches, {} if seed is None else records)
    if problems:
        shown = "".join(f"\n- {problem}" for problem in problems[:_SHOWN])
        more = f"\n- and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"materialize: {type(model).__name__} can't be initialised:{shown}{more}\n"
            "Let reset_parameters() of the module, init_weights() of the model or init= write it."
        )
    real = {(id(slot.store), slot.key) for slot in slots if not slot.tensor.is_meta}
    tensors = {id(slot.tensor): slot.tensor for slot in slots}
    return Outcome(
        [(tensors[at], record) for at, record in records.items() if tensors[at].is_meta],
        [s for s in now if s.is_buffer and (id(s.store), s.key) not in real],
    )


@contextmanager
def _replaced(model: nn.Module, slots: list[Slot], stand_ins: dict[int, Tensor]) -> Iterator[None]:
    stores: list[Store] = [s for m in model.modules() for s in (m._parameters, m._buffers)]
    before = [dict(store) for store in stores]
    try:
        for slot in slots:
            slot.store[slot.key] = stand_ins[id(slot.tensor)]
        yield
    finally:
        for store, content in zip(stores, before):
            store.clear()
            store.update(content)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    # Blocks are drawn from generators of their own; this is for a model that calls manual_seed.
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:  # by default it would start up every accelerator that this process sees
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            yield


def _unfinished(model: nn.Module, slots: list[Slot], *, buffers_only: bool) -> set[nn.Module]:
    """The modules that have, or hold modules that have, something to fill."""
    meta = [s for s in slots if s.tensor.is_meta and (s.is_buffer or not buffers_only)]
    stores = {id(slot.store) for slot in meta}
    own = {m for m in model.modules() if not stores.isdisjoint((id(m._parameters), id(m._buffers)))}
    return {m for m in model.modules() if any(part in own for part in m.modules())}


def _initialise(model: M, init: Callable[[M], object] | None, only: set[nn.Module]) -> None:
    """Call the model's own initialisation, of the modules ``only`` where one can choose."""
    root: nn.Module = model
    while [clean_name(name) for name, _ in root.named_children()] == [""]:
        root = next(root.children())  # wrapped as a whole
    own = getattr(root, "init_weights", None)
    if init is not None:
        init(model)
    elif callable(own) and not _is_transformers(root):
        own()
    else:
        _reset(root, only, {})


def _reset(module: nn.Module, only: set[nn.Module], filled_by: dict[Record, nn.Module]) -> None:
    if _is_transformers(module):
        for part in module.modules():
            # transformers marks what it initialised, also in a call that failed.
            part.__dict__.pop("_is_hf_initialized", None)
            if part not in only:
                part._is_hf_initialized = True  # type: ignore[assignment]
        module.initialize_weights()  # type: ignore[operator]
        return
    for child in module.children():
        _reset(child, only, filled_by)
    # Looked up in the class, as wrappers pass on the attributes of the module inside, which was
    # reset before. nn.MultiheadAttention's has an underscore.
    kind = type(module)
    reset = getattr(kind, "reset_parameters", None) or getattr(kind, "_reset_parameters", None)
    if reset is None or module not in only:
        return
    parameters: list[object] = [*module._parameters.values()]  # a stand-in is both
    records = [p.ptx_record for p in parameters if isinstance(p, StandIn)]
    for record in records:  # a tied parameter was filled already
        record.muted = filled_by.get(record, module) is not module
    reset(module)
    for record in records:
        record.muted = False
        if record.is_filled():
            filled_by.setdefault(record, module)


def _is_transformers(module: nn.Module) -> bool:
    # By the name of the class, without importing it.
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def _changed(before: list[Slot], now: list[Slot], stand_ins: dict[int, Tensor]) -> list[str]:
    """Parameters that the initialisation replaced, added or removed."""
    after = {(id(s.store), s.key): s for s in now}
    problems = []
    for slot in before:
        found = after.pop((id(slot.store), slot.key), None)
        if found is None:
            problems.append(f"{slot.name}: initialisation removes it")
        elif not slot.is_buffer and found.tensor is not stand_ins[id(slot.tensor)]:
            problems.append(
                f"{slot.name}: initialisation replaces it, and would undo its sharding; write into"
                " it, and tie parameters before sharding"
            )
    for slot in after.values():
        if not slot.is_buffer:
            problems.append(f"{slot.name}: initialisation adds it; create it with the model")
    return problems


def _unreal_attributes(model: nn.Module) -> list[str]:
    return [
        f"{joined_name(prefix, key)}: a plain attribute, which stays without values; register"
        " it as a buffer"
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and (isinstance(value, StandIn) or value.is_meta)
    ]


def _unwritten(
    before: list[Slot],
    now: list[Slot],
    scratches: dict[int, Scratch],
    records: dict[int, Record],
) -> list[str]:
    after = {(id(s.store), s.key): s.tensor for s in now}
    problems = []
    for slot in before:
        if not slot.tensor.is_meta or (found := after.get((id(slot.store), slot.key))) is None:
            continue
        if slot.is_buffer:
            scratch = scratches[id(slot.tensor)]
            unreal = isinstance(found, StandIn) or found.is_meta
            if unreal or (storage_id(found) == scratch.storage and not scratch.written):
                problems.append(f"{slot.name}: nothing writes all of this buffer")
        elif id(slot.tensor) in records and not records[id(slot.tensor)].is_filled():
            problems.append(f"{slot.name}: nothing fills all of this parameter")
    return problems
