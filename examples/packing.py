"""Several documents in one window, none of which sees another."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(tokens: Tensor, end_id: int) -> Tensor:
    """Numbers the documents of each window, for ``ptx.Transformer(tokens, documents=...)``.

    A document goes up to and with its end-of-text token. The window's first may have begun before
    the window, its last may go on after it: they are the parts that are here.

    Args:
        tokens: [batch, seq_len], integers.
        end_id: The token that ends a document, and occurs nowhere else.

    Returns:
        [batch, seq_len], int64, from 0 in each window.
    """
    ends = (tokens == end_id).to(torch.int64)
    return ends.cumsum(-1) - ends  # an end still belongs to what it ends


def document_positions(documents: Tensor) -> Tensor:
    """Positions that start at 0 in each document, for ``ptx.Transformer(..., positions=...)``.

    RoPE is relative, so the logits are the same without; they keep the positions small, and are
    what a model was trained with that has seen each document from its beginning.

    Args:
        documents: [batch, seq_len], of `document_ids`.

    Returns:
        [batch, seq_len], int64.
    """
    index = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = torch.zeros_like(index)
    begins[:, 1:] = index[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return index - begins.cummax(-1).values
