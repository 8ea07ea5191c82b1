"""Backwards whose gradients can't be differentiated again, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Decorate a ``backward``; it runs without autograd and without autocast.

    torch's ``once_differentiable`` only refuses if the incoming gradient needs one itself. A loss
    that is differentiated with ``create_graph=True`` gets a plain 1, so that a penalty on its
    gradient, or its Hessian, would silently be 0.

    Autocast, because a matmul that sums in float32 would come out rounded if ``backward()`` was
    called under it.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # which refuses second derivatives by itself
            with torch.no_grad():
                return backward(ctx, *grads)
        kind = next(grad.device.type for grad in grads if grad is not None)
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                results = backward(ctx, *grads)
        else:
            with torch.no_grad():
                results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        # Tied to all it depends on, or a derivative by one of them would be "unused", that is 0.
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if r is None else _Refuse.apply(r, *sources) for r in results)  # type: ignore[no-untyped-call]

    return wrapper


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "this ptx loss can't be differentiated twice (a penalty on its gradient, or a Hessian,"
            " needs that); use ptx.cross_entropy on plain logits, which can"
        )
