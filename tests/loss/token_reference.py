"""Inputs for token_logprobs, and what it has to give for them: a few lines of float64 on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from loss import conformance
from ptx.loss import token_logprobs

OPTIONS = ({}, {"temperature": 0.7}, {"temperature": 1.7, "softcap": 3.0, "logit_scale": 0.6})


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden [2, 7, 5] that isn't contiguous, weight [13, 5], bias, labels with two ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 2, 5).transpose(0, 1)
    labels = torch.randint(11, (2, 7))
    labels[0, 0], labels[0, 1], labels[1, 2] = 0, 10, 10
    labels[0, 2] = labels[1, 6] = -100
    return hidden, torch.randn(13, 5), torch.randn(13), labels


def upstreams(labels: Tensor) -> list[list[Tensor]]:
    """Gradients of the log-probabilities and of the entropies: one of them, the other, both."""
    first = torch.linspace(-1.0, 2.0, labels.numel()).reshape(labels.shape)
    second = torch.linspace(2.0, -0.5, labels.numel()).reshape(labels.shape)
    zero = torch.zeros_like(first)
    return [[first, zero], [zero, second], [first, second]]


def reference(
    given: Any,
    labels: Tensor,
    upstream: list[Tensor],
    *,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies, and their gradients, in float64 on one process."""
    exact = [t.detach().double().requires_grad_() for t in given]
    x = F.linear(*exact)[..., :vocab_size] * logit_scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    log_p = (x / temperature).log_softmax(-1)
    ignored = labels == -100
    chosen = log_p.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    results = [t.masked_fill(ignored, 0.0) for t in (chosen, entropy)]
    grads = torch.autograd.grad(results, exact, [u.double() for u in upstream])
    return [t.detach() for t in results], list(grads)


def close(got: Tensor | None, want: Tensor, tolerance: float) -> None:
    assert got is not None
    assert got.shape == want.shape
    error = (got.detach().double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"off by {float(error):.2e}"


def cases(vocab_size: int) -> list[conformance.Case]:
    """Those whose options `token_logprobs` has."""
    every = conformance.cases(vocab_size, every_option=True)
    missing = ("label_smoothing", "z_loss")
    return [
        case
        for case in every
        if case.name != "masked columns" and not any(case.options.get(o) for o in missing)
    ]


def as_loss(chunk: int | None, tp: DeviceMesh | None = None) -> Any:
    """The loss as `conformance` calls it: hidden states that are the logits, reduced outside."""

    def loss(logits: Tensor, labels: Tensor, *, vocab_size: int, **options: Any) -> Tensor:
        head = torch.eye(logits.shape[-1], dtype=logits.dtype)
        if tp is not None:
            head = distribute_tensor(head, tp, [Shard(0)])
        reduction = options.pop("reduction", "mean")
        rest = {k: v for k, v in options.items() if k not in ("label_smoothing", "z_loss")}
        losses = -token_logprobs(
            logits, head, labels, vocab_size=vocab_size, chunk_tokens=chunk, **rest
        )
        kept = (labels != options.get("ignore_index", -100)).sum().clamp(min=1)
        return {"mean": losses.sum() / kept, "sum": losses.sum(), "none": losses}[reduction]

    return loss
