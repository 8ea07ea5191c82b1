"""Count each op that runs, and tell whether it is forward, gradient or repeated work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptx.flops._flop_count import Causal, FlopCount, Phase, count_of
from ptx.flops._formulas import flops_of, label_of
from ptx.flops._modules import ModuleStack

# Functions of ptx.loss in which a fused loss multiplies by the head, and for the gradients. By name:
# importing them takes time, and whoever calls them has done so.
PROJECT = ("ptx.loss._head_chunks", "_Logits.project")
GRADIENT = ("ptx.loss._head_gradients", "Gradients.add")
# What torch's checkpointing runs inside of a backward is repeated work.
CHECKPOINT = "torch.utils.checkpoint"
ENGINE = "torch.autograd.graph"

# They make tensors from data, for the FakeTensorMode to take.
_CONSTRUCTORS = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)
_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default


class OpCounter(TorchDispatchMode):
    """Counts what runs while it is entered, above a FakeTensorMode.

    Args:
        modules: Which module is running.
        adopt: Makes a fake tensor of a real one that a function brings along.
        causal: How attention with ``is_causal=True`` counts.

    Attributes:
        in_backward: To be set while the gradients of the outputs are computed.
        failure: The error that an op raised, the op, and where it ran.
    """

    supports_higher_order_operators = True

    def __init__(
        self, modules: ModuleStack, adopt: Callable[[Tensor], Tensor], causal: Causal
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules, self.adopt, self.causal = modules, adopt, causal
        self.pieces: Counter[tuple[str, str, Phase]] = Counter()
        self.in_backward = False
        self.failure: tuple[Exception, str, str] | None = None

    def result(self) -> FlopCount:
        """What was counted so far."""
        pieces = ((*key, flops) for key, flops in self.pieces.items())
        return count_of(pieces, self.causal)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # two of three calls, from all over torch
            return args[0].fake_device
        kwargs = kwargs or {}
        try:
            if func not in _CONSTRUCTORS:
                args = self._without_real(args)
                kwargs = {key: self._without_real(value) for key, value in kwargs.items()}
            out = _grouped_mm(*args, **kwargs) if func is _GROUPED else func(*args, **kwargs)
            flops = flops_of(func, args, kwargs, out, self.causal)
        except Exception as error:
            self.failure = error, str(func), self.modules.current()
            raise
        if flops:
            self.pieces[self.modules.current(), label_of(func), self._phase()] += flops
        return out

    def _without_real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if isinstance(value, FakeTensor) else self.adopt(value)
        if type(value) in (list, tuple):
            return type(value)(self._without_real(v) for v in value)
        return value

    def _phase(self) -> Phase:
        """Read from the functions that are running, the innermost first, up to autograd's engine."""
        again = gradient = project = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__")
            if module == ENGINE:
                # With gradients enabled, the backward that we called computes no gradient.
                again = again or project or (self.in_backward and torch.is_grad_enabled())
                return "recompute" if again else "backward"
            again = again or module == CHECKPOINT
            function = module, frame.f_code.co_qualname
            gradient, project = gradient or function == GRADIENT, project or function == PROJECT
            frame = frame.f_back
        return "backward" if gradient else "forward"


def _grouped_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # On fake tensors torch takes bfloat16 only, though on a CPU it computes in any dtype.
    out: Tensor = _GROUPED(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
    return out.to(a.dtype)
