"""Token windows addressed by one integer: any world size reads the same global batches.

Sample i of the endless training stream is a function of (seed, i). A step takes the next
``global_batch`` samples and each rank reads its share, so a resume needs only the samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE_INDEX = -100

Tokens = npt.NDArray[np.integer[Any]]  # uint16 or uint32, often memory-mapped


@dataclass
class TrainBatches:
    """Iterates without end over this rank's share of each global batch of ``tokens``.

    Args:
        tokens: Cut into windows of ``seq_len``, which come in a new order each epoch.
        seq_len: Tokens of a sample.
        global_batch: Samples of a step over all ranks.
        dp_rank: ``ptx.data_mesh(mesh).get_local_rank()``, which tp, cp and pp peers share.
        dp_world: ``ptx.data_mesh(mesh).size()``.
        seed: Decides every order.
        consumed: Samples that all ranks together have read: the whole position.
        digest: Names the contents of ``tokens``, so that a resume on others is refused.

    Raises:
        ValueError: A batch doesn't split over the ranks, or an epoch is smaller than one.

    Memory: 8 bytes for each window of the epoch (of two while a batch crosses from one to the next).
    """

    tokens: Tokens
    seq_len: int
    global_batch: int
    dp_rank: int = 0
    dp_world: int = 1
    seed: int = 0
    consumed: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        self.epoch_size = max(len(self.tokens) - 1, 0) // self.seq_len  # the last label is one more
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        _check(self.global_batch, self.dp_world, self.epoch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            # Counted before the loop's body: a checkpoint saved there must not repeat this batch.
            first, self.consumed = self.consumed, self.consumed + self.global_batch
            yield self.batch(first)

    def batch(self, consumed: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels that follow ``consumed`` samples, int64 [batch, seq_len], shifted."""
        samples = _share(consumed, self.global_batch, self.dp_rank, self.dp_world)
        return _gather(self.tokens, self.seq_len, self.window_ids(samples))

    def window_ids(self, samples: range) -> list[int]:
        """Which window each sample is. The epoch is the sample's own: a batch may cross one."""
        size = self.epoch_size
        epochs = range(samples.start // size, (samples.stop - 1) // size + 1)
        # Kept until the next epoch: 10 million windows take a quarter of a second to permute.
        self._orders = {
            e: self._orders[e]
            if e in self._orders
            else np.random.default_rng((self.seed, e)).permutation(size)
            for e in epochs
        }
        return [int(self._orders[sample // size][sample % size]) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        stream = {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "tokens": len(self.tokens),
            "digest": self.digest,
        }
        return {**stream, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the samples consumed; ranks and global batch may differ from then.

        Raises:
            ValueError: The state is of another stream: seed, seq_len or the tokens differ.
        """
        mine = self.state_dict() | {"consumed": state["consumed"]}
        if state != mine:
            differ = [key for key in mine if state.get(key) != mine[key]]
            raise ValueError(
                f"load_state_dict: saved {state}, now {mine}; {', '.join(differ)}: not the same"
                " samples. Go on with the data and the options of then, or start a run of its own"
            )
        self.consumed = state["consumed"]


def validation_batches(
    tokens: Tokens, seq_len: int, global_batch: int, dp_rank: int, dp_world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each token but the first is a label exactly once over all ranks, in a fixed order.

    Every rank gets equally many batches of equal shapes; past the end labels are ``IGNORE_INDEX``,
    so weight losses by the labels kept (``ptx.token_mean``).
    """
    windows = -(-max(len(tokens) - 1, 0) // seq_len)  # rounded up: the last may be short
    _check(global_batch, dp_world)
    for first in range(0, windows, global_batch):
        yield _gather(tokens, seq_len, _share(first, global_batch, dp_rank, dp_world))


def count_tokens(labels: Tensor) -> Tensor:
    """How many labels are trained on, int64 scalar on their device: padding isn't counted."""
    return (labels != IGNORE_INDEX).sum()


def _check(global_batch: int, dp_world: int, epoch_size: int | None = None) -> None:
    wrong = []
    if global_batch < 1 or global_batch % dp_world:
        wrong.append(f"global_batch {global_batch} is no multiple of {dp_world} data ranks")
    if epoch_size is not None and epoch_size < global_batch:
        wrong.append(f"{epoch_size} windows of seq_len can't fill global_batch {global_batch}")
    if wrong:
        raise ValueError(
            f"batches: {', and '.join(wrong)}; change --global-batch or --seq-len, or take more text"
        )


def _share(first: int, global_batch: int, dp_rank: int, dp_world: int) -> range:
    size = global_batch // dp_world
    return range(first + dp_rank * size, first + (dp_rank + 1) * size)


def _gather(tokens: Tokens, seq_len: int, windows: list[int] | range) -> tuple[Tensor, Tensor]:
    inputs = np.zeros((len(windows), seq_len), dtype=np.int64)
    labels = np.full_like(inputs, IGNORE_INDEX)  # stays where the tokens end
    for row, window in enumerate(windows):
        text = tokens[window * seq_len : (window + 1) * seq_len + 1]
        inputs[row, : len(text[1:])] = text[:-1]
        labels[row, : len(text[1:])] = text[1:]
    return torch.from_numpy(inputs), torch.from_numpy(labels)
