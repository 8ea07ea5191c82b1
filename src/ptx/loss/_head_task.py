"""What a loss over a head is about, besides tensors with a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ptx.loss._options import LossOptions

# Below, reading the weight and adding up its gradient would cost as much as the matmuls.
MIN_CHUNK = 256


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Task:
    """What a loss needs besides tensors with a gradient.

    Args:
        labels: [n] int64, global ids, of the rows that are computed.
        rows: [n], where these lie among the N rows of the hidden states; None: n = N, all of them.
        chunk: How many rows at a time.
        classes: How many of the real classes each rank has.
        mesh: The ranks that share the vocabulary; None: this one has all of it.
        options: As everywhere.
        needs: Which gradients are wanted.
        sum_hidden: Whether the hidden states' gradient is to be summed over ``mesh``.
        entropy: Whether the entropy of each row is wanted too.
    """

    labels: Tensor
    rows: Tensor | None
    chunk: int
    classes: tuple[int, ...]
    mesh: DeviceMesh | None
    options: LossOptions
    needs: Needs
    sum_hidden: bool
    entropy: bool = False

    @property
    def mine(self) -> int:
        """The number of real classes of this rank, its first rows of the weight."""
        return self.classes[self.rank]

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    def local_labels(self) -> Tensor:
        """[n], the row of this rank's weight; out of its range where another rank has the label."""
        return self.labels - sum(self.classes[: self.rank])

    def chunks(self) -> Iterator[slice]:
        n = self.labels.numel()
        return (slice(start, min(start + self.chunk, n)) for start in range(0, n, self.chunk))


def default_chunk(tokens: int, width: int, ranks: int = 1) -> int:
    """Rows for which a chunk of logits is about as large as the weight, in chunks of like size.

    Of ``ranks`` that share the vocabulary each has a chunk as large as the whole weight: in return
    most batches are a single chunk, which then need no matmul twice.
    """
    largest = max(width * ranks, MIN_CHUNK)
    chunks = max(1, -(-tokens // largest))
    rows = -(-tokens // chunks)
    return max(1, min(largest, -(-rows // 16) * 16))
