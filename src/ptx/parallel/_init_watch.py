"""Watch an initialisation for what it does outside of parameters: buffers written, draws made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptx.parallel import _init_draw
from ptx.parallel._init_record import DRAWS, StandIn, draw_fill, running_line, tensors_in

# Ops that take a tensor's shape, dtype or device, and not its values.
_TEMPLATES = frozenset(
    ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_empty_strided")
) | {"new_zeros", "new_ones", "new_full"}


class Scratch:
    """A buffer while initialisation runs: a real tensor on CPU, and whether all of it was written.

    Args:
        name: For keys and errors.
        tensor: The model's buffer on meta; or a real one, which is copied, to be read and spoiled.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.written = not tensor.is_meta or tensor.numel() == 0
        if tensor.is_meta:
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        else:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self.tensor = full.detach().to("cpu", copy=True)
        self.storage = storage_id(self.tensor)
        self.draws = 0


class Watch(TorchDispatchMode):
    """Sees every op of an initialisation; notes writes to buffers, refuses draws it can't key.

    Args:
        buffers: The buffers.
        seed: Keys draws into buffers; None: there may be none.
    """

    def __init__(self, buffers: Sequence[Scratch], seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {buffer.storage: buffer for buffer in buffers}
        self._seed = seed

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, StandIn) for t in types):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, name, args, kwargs)
        overwrites = name in ("fill_", "zero_", "copy_") or "out" in kwargs
        overwritten = _written(func, args, kwargs) if overwrites else []
        if not func.is_view and name not in _TEMPLATES:
            self._refuse_reads(func, args, kwargs, overwritten)
        result = func(*args, **kwargs)
        for tensor in overwritten:
            buffer = self._buffers.get(storage_id(tensor))
            if buffer and tensor.numel() == buffer.tensor.numel():
                buffer.written = True
        return result

    def _draw(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buffer = self._buffers.get(storage_id(args[0])) if name in DRAWS else None
        if buffer is None:
            raise ValueError(
                f"materialize: {func} at {running_line()} draws outside of a parameter, where the"
                " ranks' own random states decide; draw into the parameter (p.normal_(0.0, std)),"
                " or build that part on a real device: real tensors keep their values"
            )
        region = _init_draw.region_of(args[0], tuple(buffer.tensor.shape))
        if self._seed is None or region is None or region.size != tuple(buffer.tensor.shape):
            raise ValueError(
                f"materialize: {func} at {running_line()} draws buffer {buffer.name!r}, or a part"
                f" of it, and seed is {self._seed}; draw all of it at once, with a seed (without"
                " one pass an init= that doesn't)"
            )
        fill = draw_fill(func, buffer.name, args[1:], kwargs)
        key = (self._seed, buffer.name, buffer.draws)
        buffer.draws += 1
        start = (0,) * buffer.tensor.ndim
        _init_draw.draw(buffer.tensor, start, region=region, fill=fill, key=key)
        buffer.written = True
        return args[0]

    def _refuse_reads(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], overwritten: list[Tensor]
    ) -> None:
        for tensor in tensors_in((args, kwargs)):
            buffer = self._buffers.get(storage_id(tensor))
            if buffer and not buffer.written and not any(tensor is t for t in overwritten):
                raise ValueError(
                    f"materialize: {func} at {running_line()} reads buffer {buffer.name!r} before"
                    " all of it was written; let its module's reset_parameters, or init=, first"
                    " write it as a whole"
                )


def storage_id(tensor: Tensor) -> int | None:
    """Equal for tensors that share memory; None: has none of its own."""
    if isinstance(tensor, DTensor | StandIn):
        return None
    # Nothing public identifies a storage: data_ptr is 0 for every empty one.
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args)) | kwargs
    written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    return tensors_in([given[name] for name in written if name in given])
