"""Watch the sizes of the tensors that a piece of code makes, and how much of it is alive at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """While active: the largest tensor that came out of an op, and the peak of what was allocated and is alive.

    Args:
        given: Tensors that exist before; what shares their memory isn't counted.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.largest: tuple[int, torch.Size, str] = (0, torch.Size(), "")
        self.seen = {t.untyped_storage()._cdata for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its own dispatch comes first; we then see what it does locally
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # not the fakes of DTensor
                self._see(tensor, str(func))
        return result

    def _see(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or tensor.is_meta:
            return
        self.seen.add(key)
        self.largest = max(self.largest, (size, tensor.shape, op), key=lambda found: found[0])
        weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Storages(TorchDispatchMode):
    """The size in bytes of every storage that comes out of an op, and didn't go into it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in [out] if isinstance(out, torch.Tensor) else []:
            if (storage := tensor.untyped_storage()).data_ptr() not in given:
                self.sizes[storage.data_ptr()] = storage.nbytes()
                self.alive.append(tensor)
        return out

    def count(self, size: int) -> int:
        return sum(s == size for s in self.sizes.values())

    def largest(self, but: torch.Tensor | None = None) -> int:
        at = None if but is None else but.untyped_storage().data_ptr()
        return max(size for key, size in self.sizes.items() if key != at)
