"""Record the collectives that a piece of code issues, with their sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = {"c10d", "_c10d_functional"}
NO_COMMUNICATION = {"wait_tensor", "_wrap_tensor_autograd"}


class CollectiveLog(TorchDispatchMode):
    """While active, counts (name, bytes of the largest tensor involved) in ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its own dispatch comes first; we then see what it does locally
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")
        if name[0] in NAMESPACES and name[1] not in NO_COMMUNICATION:
            tensors = [
                t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)
            ]
            self.calls[name[1], max((t.nbytes for t in tensors), default=0)] += 1
        return result

    def count(self, *names: str) -> int:
        """Calls whose name contains one of ``names``; all without any."""
        return sum(
            n for (name, _), n in self.calls.items() if not names or any(k in name for k in names)
        )
