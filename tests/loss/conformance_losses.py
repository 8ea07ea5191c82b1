"""How the table calls each loss: the one place where a new loss joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ptx.loss
from loss import conformance

OF_LOGITS = ("cross_entropy", "vocab_parallel_ce", "chunked_ce")
OF_HIDDEN = ("fused_linear_ce", "token_logprobs")
CHUNKED = ("chunked_ce", "fused_linear_ce", "token_logprobs")
LOSSES = tuple(name for name in (*OF_LOGITS, *OF_HIDDEN) if hasattr(ptx.loss, name))


def of_logits(
    name: str,
    logits: Tensor,
    labels: Tensor,
    tp: DeviceMesh | None,
    vocab_size: int,
    **options: Any,
) -> Tensor:
    """``logits``: [..., P], plain, or a DTensor over ``tp``."""
    if name == "vocab_parallel_ce":
        columns = logits.shape[-1]
        mine = logits.to_local() if isinstance(logits, DTensor) else logits
        return ptx.loss.vocab_parallel_ce(
            mine, labels, tp, vocab_size=vocab_size, padded_size=columns, **options
        )
    loss: Tensor = getattr(ptx.loss, name)(logits, labels, vocab_size=vocab_size, **options)
    return loss


def of_hidden(
    name: str, hidden: Tensor, head: Tensor | nn.Module, labels: Tensor, **options: Any
) -> Tensor:
    if name != "token_logprobs":
        loss: Tensor = getattr(ptx.loss, name)(hidden, head, labels, **options)
        return loss
    # No loss by itself: one is made of what it returns for each token.
    reduction = options.pop("reduction", "mean")
    logprobs = ptx.loss.token_logprobs(hidden, head, labels, **options)
    if options.get("entropy"):
        logprobs, entropy = logprobs
        losses = conformance.ENTROPY_WEIGHT * entropy - logprobs
    else:
        losses = -logprobs
    if reduction == "none":
        return losses
    kept = (labels != options.get("ignore_index", -100)).sum().clamp(min=1)
    return losses.sum() / (kept if reduction == "mean" else 1)


def fits(name: str, options: dict[str, Any]) -> bool:
    """Whether the loss has these options."""
    if name == "token_logprobs":
        return not {"label_smoothing", "z_loss"} & options.keys()
    return not {"temperature", "entropy"} & options.keys()


def on_full_logits(name: str, tp: DeviceMesh | None, chunk: int | None) -> Callable[..., Tensor]:
    """The loss as `conformance.check` calls it, on the full logits, of which each rank of ``tp`` has its columns.

    One of hidden states takes the logits for those, and the identity as its head.
    """
    extra = {"chunk_tokens": chunk} if name in CHUNKED else {}

    def loss(logits: Tensor, labels: Tensor, *, vocab_size: int, **options: Any) -> Tensor:
        options |= extra
        if name in OF_HIDDEN:
            head = torch.eye(logits.shape[-1], dtype=logits.dtype)
            if tp is not None and tp.size() > 1:
                head = _split(head, tp, 0)
            return of_hidden(name, logits, head, labels, vocab_size=vocab_size, **options)
        if tp is not None and tp.size() > 1:
            logits = _split(logits, tp, logits.ndim - 1)
        return of_logits(name, logits, labels, tp, vocab_size, **options)

    return loss


def _split(full: Tensor, tp: DeviceMesh, dim: int) -> DTensor:
    """`distribute_tensor` without its broadcast, and differentiable."""
    size = full.shape[dim]
    share = -(-size // tp.size())
    first = min(tp.get_local_rank() * share, size)
    mine = full.narrow(dim, first, min(share, size - first))
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(
        mine, tp, [Shard(dim)], run_check=False, shape=full.shape, stride=stride
    )
