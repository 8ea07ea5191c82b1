"""Which tensor goes into which file of a checkpoint, and which rank writes that file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ptx.hf._folder import SINGLE

# transformers' limit before version 5; a loader may have to hold one file.
_MOST_BYTES = 5_000_000_000
# Fewer bytes in a file aren't worth another writer.
_LEAST_BYTES = 2**27


@dataclass(frozen=True)
class Piece:
    """A tensor as it will be on file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Share:
    """What one group of ranks has: a whole model, or one pipeline stage.

    Args:
        ranks: Global ranks; all of them together hold every piece.
        pieces: In the model's order.
    """

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class File:
    """One file of the checkpoint."""

    name: str
    writer: int
    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]


def lay_out(shares: list[Share], file_bytes: int | None) -> list[File]:
    """Files in the order in which they are written; the same on every rank.

    Each group's files are dealt out over its ranks, so that all write about as much. A piece that
    several groups have (a tied embedding, replicas that know nothing of each other) is the first's.
    """
    known: set[str] = set()
    drafts: list[tuple[int, Share, list[Piece]]] = []
    for share in shares:
        mine = [piece for piece in share.pieces if piece.key not in known]
        known.update(piece.key for piece in mine)
        filled = _filled(mine, file_bytes or _limit(mine, len(share.ranks)))
        for i, pieces in enumerate(filled):
            writer = share.ranks[i * len(share.ranks) // len(filled) % len(share.ranks)]
            drafts.append((writer, share, pieces))
    names = [SINGLE]
    if len(drafts) > 1:
        names = [f"model-{i:05}-of-{len(drafts):05}.safetensors" for i in range(1, len(drafts) + 1)]
    return [
        File(name, writer, share.ranks, tuple(pieces))
        for name, (writer, share, pieces) in zip(names, drafts)
    ]


def _limit(pieces: list[Piece], ranks: int) -> int:
    share = -(-sum(piece.nbytes for piece in pieces) // ranks)
    return min(max(share, _LEAST_BYTES), _MOST_BYTES)


def _filled(pieces: list[Piece], limit: int) -> list[list[Piece]]:
    files: list[list[Piece]] = []
    size = limit + 1
    for piece in pieces:
        if size + piece.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.nbytes
    return files
