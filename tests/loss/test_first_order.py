"""Second derivatives are refused, never silently 0; a backward under autocast changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ptx.loss import chunked_ce, cross_entropy, fused_linear_ce, token_logprobs

LABELS = torch.tensor([0, 12, 3, 3, 7, 1])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fused": lambda h, w: fused_linear_ce(h, w, LABELS, chunk_tokens=4),
    "fused none": lambda h, w: fused_linear_ce(h, w, LABELS, reduction="none").sum(),
    "logprobs": lambda h, w: token_logprobs(h, w, LABELS).sum(),
    "entropy": lambda h, w: token_logprobs(h, w, LABELS, entropy=True)[1].sum(),
    "chunked": lambda h, w: chunked_ce(h @ w.t(), LABELS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_second_derivative_raises(name: str) -> None:
    hidden, weight = _inputs()
    loss = LOSSES[name](hidden, weight)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (want,) = torch.autograd.grad(LOSSES[name](hidden, weight), hidden)
    assert torch.equal(grad, want)  # asking for a graph is fine, as long as nobody follows it
    with pytest.raises(RuntimeError, match=r"can't be differentiated twice.*ptx\.cross_entropy"):
        (loss + grad.square().sum()).backward()
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.functional.hessian(
            lambda h: LOSSES[name](h, weight.detach()), hidden.detach()
        )


def test_cross_entropy_has_one() -> None:
    hidden, weight = _inputs()
    loss = cross_entropy(hidden @ weight.t(), LABELS, z_loss=0.1)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    grad.square().sum().backward()
    assert hidden.grad.abs().max() > 0


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "chunked"])  # its matmul is torch's
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_under_autocast_is_the_same(name: str, dtype: torch.dtype) -> None:
    grads = []
    for under in (False, True):
        hidden, weight = (t.detach().to(dtype).requires_grad_() for t in _inputs())
        loss = LOSSES[name](hidden, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=under):
            loss.backward()
        grads.append((hidden.grad, weight.grad))
    for outside, inside in zip(*grads):
        assert torch.equal(outside, inside)


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, generator=generator, requires_grad=True)
    weight = torch.randn(13, 5, generator=generator, requires_grad=True)
    return hidden, weight
