"""The ways to compute the one loss: the sum of the cross-entropies of a batch's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ptx
from packing import document_ids, document_positions

LossName = Literal[
    "fused-linear",
    "eager",
    "chunked",
    "compiled",
    "vocab-parallel",
    "chunked-backward",  # another name of chunked
    "loss-parallel",  # another name of vocab-parallel
]
LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, tokens, labels) -> scalar


def make_loss(
    name: LossName, mesh: DeviceMesh, vocab_size: int, *, chunk: int = 0, end_id: int | None = None
) -> LossSum:
    """Any of them works on any mesh, and gives the same numbers; memory and speed differ.

    Args:
        name: Which.
        mesh: Of `ptx.build_mesh`.
        vocab_size: Entries that count; rows of the head past them are padding.
        chunk: Tokens at a time, of those that work in chunks; 0: by the shapes.
        end_id: Ends a document, beyond which no token attends; None: all of a sample is one.
    """

    def mask(tokens: Tensor) -> dict[str, Tensor]:
        if end_id is None:
            return {}
        documents = document_ids(tokens, end_id)
        return {"documents": documents, "positions": document_positions(documents)}

    options: dict[str, Any] = {"reduction": "sum", "vocab_size": vocab_size}

    def with_logits(of_logits: Callable[..., Tensor]) -> LossSum:
        return lambda model, tokens, labels: of_logits(
            model(tokens, **mask(tokens)), labels, **options
        )

    if name == "fused-linear":  # the logits of all tokens never exist

        def fused(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
            hidden = model(tokens, return_hidden=True, **mask(tokens))
            return ptx.fused_linear_ce(
                hidden, model.output, labels, chunk_tokens=chunk or None, **options
            )

        return fused

    if name in ("vocab-parallel", "loss-parallel"):

        def of_logits(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
            columns = logits.shape[-1]  # of all ranks
            return ptx.vocab_parallel_ce(logits, labels, mesh["tp"], padded_size=columns, **options)

        return with_logits(of_logits)
    if name == "compiled":
        return with_logits(torch.compile(ptx.cross_entropy))
    if name in ("chunked", "chunked-backward"):  # a few tokens' temporaries at a time
        return with_logits(partial(ptx.chunked_ce, chunk_tokens=chunk or None))
    return with_logits(ptx.cross_entropy)
