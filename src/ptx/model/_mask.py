"""Which keys a query may attend to, worked out once per forward and shared by the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskInfo:
    """What an attention core needs to know about the sequence.

    A query attends to a key when the key's index in the sequence is not above its own, both have
    the same document id, and their distance is below the window. Index, not position id: position
    ids only feed RoPE. A core that holds a part of the sequence (context parallel) works from
    ``documents`` and ``window`` and ignores ``dense``.

    Args:
        positions: [S] or [B, S], the position ids of this sequence.
        documents: [B, S], document ids, or None: one document.
        window: Keys at distance < window, or None: no limit.
        dense: bool [B or 1, 1, S, S], True where a query (dim 2) attends to a key (dim 3). None:
            plain causal attention says the same, or nobody asked for it
            (`Transformer.dense_masks`).
    """

    positions: Tensor
    documents: Tensor | None
    window: int | None
    dense: Tensor | None

    @property
    def seq_len(self) -> int:
        """Length of the sequence that attention sees, after any gather over a tp group."""
        return self.positions.shape[-1]

    @property
    def is_causal(self) -> bool:
        """Whether plain causal attention is exact."""
        return self.documents is None and (self.window is None or self.window >= self.seq_len)


def mask_info(
    positions: Tensor, documents: Tensor | None, window: int | None, *, dense: bool = True
) -> MaskInfo:
    """Describes one kind of layer; with ``dense`` also builds the mask where plain causal won't do.

    Memory: B * S * S bytes with documents, S * S with a window alone, none for plain causal.
    """
    info = MaskInfo(positions, documents, window, None)
    if not dense or info.is_causal:
        return info
    index = torch.arange(info.seq_len, device=positions.device)
    distance = index[:, None] - index  # query's index minus key's
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    allowed = allowed[None, None]  # [1, 1, S, S]
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    return MaskInfo(positions, documents, window, allowed)
