"""Text as token windows addressed by one integer: any world size reads the same global batches.

Sample i of the endless training stream is a function of (seed, i). A step takes the next
``global_batch`` samples and each rank reads its share, so a resume needs only the samples consumed.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

CORPUS = Path(__file__).parent / "corpus" / "corpus.txt.xz"
TOKENIZER = Path(__file__).parent / "corpus" / "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT = slice(5, None, 12)  # documents for validation: every 12th, from the first dozen's middle
IGNORE_INDEX = -100

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Corpus:
    train: Tokens  # [n], memory-mapped; each document is followed by one end-of-text token
    valid: Tokens
    tokenizer: Tokenizer


def load_corpus(cache: Path, *, corpus: Path = CORPUS, tokenizer: Path = TOKENIZER) -> Corpus:
    """Tokenises ``corpus`` (format: corpus/SOURCE.md) once and maps the result from ``cache``.

    Files in ``cache`` are named by the contents they were made from. Ranks may race: each writes
    a file of its own, all with equal bytes, and renames it.
    """
    vocabulary = Tokenizer.from_file(str(tokenizer))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in (corpus, tokenizer)]
    key = "-".join([*digests, f"{HELD_OUT.start}of{HELD_OUT.step}"])
    files = [cache / f"{key}-{part}.npy" for part in ("train", "valid")]
    if not all(file.exists() for file in files):
        for file, texts in zip(files, split(read_documents(corpus)), strict=True):
            _write_whole(file, tokenize(texts, vocabulary))
    train, valid = (np.load(file, mmap_mode="r") for file in files)
    return Corpus(train, valid, vocabulary)


def read_documents(corpus: Path) -> list[str]:
    """Reads one document a line, each after its name and a tab."""
    with lzma.open(corpus, "rt", encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\n").split("\t", 1)[1] for line in lines]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Splits whole documents into those to train on and those held out."""
    if len(documents) <= HELD_OUT.start:
        raise ValueError(f"split: {HELD_OUT} of {len(documents)} documents is none; add documents")
    held_out = range(len(documents))[HELD_OUT]
    return [text for i, text in enumerate(documents) if i not in held_out], documents[HELD_OUT]


def tokenize(texts: list[str], tokenizer: Tokenizer, end_of_text: str = END_OF_TEXT) -> Tokens:
    """Concatenates the documents, each followed by one ``end_of_text``.

    Nothing else is added, whatever the tokenizer's post-processor would (a BOS, say).
    """
    end, size = tokenizer.token_to_id(end_of_text), tokenizer.get_vocab_size()
    if end is None or size > 2**16:
        raise ValueError(
            f"tokenize: id of {end_of_text!r} is {end}, {size} entries; pass the end-of-text token"
            f" of this tokenizer, and store wider integers than uint16 for more than {2**16}"
        )
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*text.ids, end], dtype=np.uint16) for text in encoded])


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

    Raises:
        ValueError: A batch doesn't split over the ranks, or an epoch is smaller than one.
    """

    tokens: Tokens
    seq_len: int
    global_batch: int
    dp_rank: int = 0
    dp_world: int = 1
    seed: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        self.epoch_size = max(len(self.tokens) - 1, 0) // self.seq_len  # the last label is one more
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
        # Drawn anew for every batch: 10,000 windows take 0.1 ms. Cache it for far larger corpora.
        order = {e: np.random.default_rng((self.seed, e)).permutation(size) for e in epochs}
        return [int(order[sample // size][sample % size]) for sample in samples]

    def state_dict(self) -> dict[str, int]:
        stream = {"seed": self.seed, "seq_len": self.seq_len, "tokens": len(self.tokens)}
        return {**stream, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after the samples consumed; ranks and global batch may differ from then."""
        mine = self.state_dict() | {"consumed": state["consumed"]}
        if state != mine:
            raise ValueError(f"load_state_dict: saved {state}, now {mine}; not the same samples")
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


def _check(global_batch: int, dp_world: int, epoch_size: int | None = None) -> None:
    wrong = []
    if global_batch < 1 or global_batch % dp_world:
        wrong.append(f"global_batch {global_batch} is no multiple of {dp_world} data ranks")
    if epoch_size is not None and epoch_size < global_batch:
        wrong.append(f"{epoch_size} windows can't fill global_batch {global_batch}")
    if wrong:
        raise ValueError(f"batches: {', and '.join(wrong)}; change global_batch or seq_len")


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


def _write_whole(path: Path, tokens: Tokens) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # another rank writes its own
    try:
        with part.open("wb") as file:
            np.save(file, tokens)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
