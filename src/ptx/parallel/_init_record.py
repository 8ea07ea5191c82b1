"""Stand-ins that look like whole parameters, and note what an initialisation does to them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptx.parallel import _init_draw

# Draws whose elements don't depend on each other.
DRAWS = frozenset(
    {"normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "bernoulli_"}
)

# Where code is not the model's own, for errors.
_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_init")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_LAYERS = os.path.join(_TORCH, "nn", "modules")

Op = Callable[[Tensor, tuple[int, ...]], object]


class Record:
    """What an initialisation does to one parameter, to be repeated on any part of it.

    Args:
        name: Keys the draws and names the parameter in errors.
        shape: Of the whole parameter.
        seed: Keys the draws; None: they will not be made.

    Attributes:
        muted: Ignore what is done now.
        open: Whether the initialisation still runs.
    """

    def __init__(self, name: str, shape: tuple[int, ...], seed: int | None) -> None:
        self.name = name
        self.shape = shape
        self.muted = False
        self.open = True
        self._seed = seed or 0
        self._ops: list[Op] = []
        self._draws = 0
        self._filled = 0 in shape
        self._slices: list[list[tuple[int, int]]] = [[] for _ in shape]  # filled, by dim

    def add(self, op: Op, region: _init_draw.Region, *, overwrites: bool) -> None:
        """Note an op that acts on a region; ``overwrites``: whatever was there before."""
        if self.muted:
            return
        cut = [d for d, length in enumerate(self.shape) if region.size[d] != length]
        if overwrites and not cut:
            self._ops.clear()
            self._filled = True
        elif overwrites and len(cut) == 1:
            start = region.start[cut[0]]
            self._slices[cut[0]].append((start, start + region.size[cut[0]]))
        self._ops.append(op)

    def add_draw(self, fill: _init_draw.Fill, region: _init_draw.Region) -> None:
        """Note a random fill of a region."""
        if self.muted:
            return
        key = (self._seed, self.name, self._draws)
        self._draws += 1
        op = partial(_init_draw.draw, region=region, fill=fill, key=key)
        self.add(op, region, overwrites=True)

    def is_filled(self) -> bool:
        """Whether every element was given a value: at once, or in slices along one dim."""
        return self._filled or any(map(_covers, self._slices, self.shape))

    def replay(self, tensor: Tensor) -> None:
        """Do it to ``tensor``, which is the parameter or any shard of it."""
        local, offsets = _init_draw.shard_of(tensor)
        if local.numel() == 0:  # also of a rank outside the mesh
            return
        with torch.no_grad():
            for op in self._ops:
                op(local, offsets)


class StandIn(Tensor):
    """A tensor on CPU without data, a parameter or a view of one, whose in-place ops are noted."""

    # Names that neither Tensor has nor a user gives.
    ptx_record: Record
    ptx_view: Tensor  # on meta; its shape, strides and offset say which elements these are

    @staticmethod
    def __new__(cls, record: Record, view: Tensor) -> StandIn:
        self: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        self.ptx_record, self.ptx_view = record, view
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StandIn({self.ptx_record.name!r}, {tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        target = kwargs.get("out") if name == "eye" else (args or (None,))[0]
        tensors = tensors_in((args, kwargs))
        if not isinstance(target, StandIn):
            target = next(t for t in tensors if isinstance(t, StandIn))
            raise _refusal(target.ptx_record, func)
        if any(_has_no_values(t) for t in tensors if t is not target):
            raise _refusal(target.ptx_record, func)
        if not target.ptx_record.open:
            raise ValueError(
                f"materialize: {target.ptx_record.name!r}: its initialisation kept a reference to what"
                " stood for it, and uses it afterwards; keep a reference to the module instead"
            )
        if func.is_view:
            return _view(target, func, args[1:], kwargs)
        _note(target, func, name, args[1:], kwargs)
        return target


def stand_in_for(record: Record, parameter: Tensor) -> nn.Parameter:
    """A Parameter of the whole shape, with the attributes that its author gave the real one."""
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    made = nn.Parameter(StandIn(record, full), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


@contextmanager
def trunc_normal_recorded() -> Iterator[None]:
    """Make ``nn.init.trunc_normal_`` of a stand-in one draw; of other tensors it stays as it is."""
    # The private function is the one place that copies of the public one reach as well: those of
    # `from torch.nn.init import trunc_normal_`, and transformers' TORCH_INIT_FUNCTIONS.
    original: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_

    def trunc_normal(
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if not isinstance(tensor, StandIn):
            return original(tensor, mean, std, a, b, generator=generator)
        _refuse_generator(tensor.ptx_record.name, "trunc_normal_", generator)
        _init_draw.trunc_normal_limits(mean, std, a, b)
        fill = partial(_init_draw.trunc_normal, mean=mean, std=std, a=a, b=b)
        tensor.ptx_record.add_draw(fill, _region(tensor, "trunc_normal_"))
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def draw_fill(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _init_draw.Fill:
    """A random in-place op as a function of a block and a generator; refuses a generator given."""
    options = {key: value for key, value in kwargs.items() if key != "generator"}
    _refuse_generator(name, func, kwargs.get("generator"))
    return lambda block, generator: func(block, *args, **options, generator=generator)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def running_line() -> str:
    """The line of the model's code that runs now; torch's own layers count as the model's."""
    for frame in reversed(traceback.extract_stack()):
        path = os.path.abspath(frame.filename)
        in_torch = path.startswith(_TORCH) and not path.startswith(_TORCH_LAYERS)
        if not in_torch and not path.startswith(_OURS):
            return f"{os.path.basename(path)}:{frame.lineno} `{frame.line}`"
    return "an unknown line"


def _view(target: StandIn, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    views = func(target.ptx_view, *args, **kwargs)
    if any(view.dtype != target.dtype for view in tensors_in(views)):
        raise _refusal(target.ptx_record, func)
    if isinstance(views, Tensor):
        return StandIn(target.ptx_record, views)
    return [StandIn(target.ptx_record, view) for view in views]


def _note(
    target: StandIn, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add one in-place op to the record, or refuse it."""
    record, view = target.ptx_record, target.ptx_view
    if name in DRAWS and not tensors_in(args):
        fill = draw_fill(func, record.name, args, kwargs)
        func(view, *args, **kwargs)  # on meta: torch's own checks of the numbers
        record.add_draw(fill, _region(target, func))
    elif name == "copy_":
        source = args[0].to(view.dtype, copy=True).expand(view.shape)
        region = _region(target, func)
        copy = partial(_init_draw.copy, region=region, source=source)
        record.add(copy, region, overwrites=True)
    elif name == "eye":
        region = _region(target, func)
        if view.stride() != torch.empty(record.shape, device="meta").stride():
            raise _refusal(record, func)
        record.add(_init_draw.eye, region, overwrites=True)
    elif name in ("fill_", "zero_") or (name.endswith("_") and torch.Tag.pointwise in func.tags):
        if any(t.ndim for t in tensors_in((args, kwargs))):
            raise _refusal(record, func)
        numbers = [a.clone() if isinstance(a, Tensor) else a for a in args]
        func(view, *numbers, **kwargs)
        region = _region(target, func)
        op = partial(_call, func, numbers, kwargs)
        write = partial(_init_draw.write, region=region, op=op)
        record.add(write, region, overwrites=name in ("fill_", "zero_"))
    else:
        raise _refusal(record, func)


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensor: Tensor) -> None:
    func(tensor, *args, **kwargs)


def _region(target: StandIn, func: object) -> _init_draw.Region:
    region = _init_draw.region_of(target.ptx_view, target.ptx_record.shape)
    if region is None:
        raise ValueError(
            f"materialize: {target.ptx_record.name!r}: {func} at {running_line()} acts on a view that"
            " isn't a box of it (a step, merged or repeated dims); use the whole parameter, a slice"
            " or a transposed view"
        )
    return region


def _refuse_generator(name: str, func: object, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise ValueError(
            f"materialize: {name!r}: {func} at {running_line()} brings a generator, but each block"
            " is drawn from a stream of its own; leave generator= out"
        )


def _refusal(record: Record, func: object) -> ValueError:
    return ValueError(
        f"materialize: {record.name!r}: {func} at {running_line()} needs the values of a whole"
        " parameter, which no rank holds; use in-place draws, fills, arithmetic with numbers or"
        " copies of plain tensors, or build that part on a real device: real tensors keep their"
        " values"
    )


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, StandIn | DTensor) or tensor.is_meta


def _covers(slices: list[tuple[int, int]], length: int) -> bool:
    end = 0
    for start, stop in sorted(slices):
        if start > end:
            return False
        end = max(end, stop)
    return end >= length
