"""Documents to tokens on all cores, each ended by exactly one end-of-text token."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ptx.hf import HfTokenizer, load_tokenizer
from token_cache import TokenFile

END_OF_TEXT = "<|endoftext|>"  # where a tokenizer's files name no end of their own

_BATCH = 2**23  # characters that are encoded at once: some 100 MB of tokens and their offsets
_SAY_EVERY = 10.0  # seconds


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and how documents begin and end in it.

    Args:
        tokenizer: Of the tokenizers library.
        end_id: Ends each document.
        begin_id: Begins each document; None: nothing does.
        size: One more than the largest id.
    """

    tokenizer: Tokenizer
    end_id: int
    begin_id: int | None
    size: int

    @property
    def dtype(self) -> npt.DTypeLike:
        """uint16 for at most 65,536 entries, else uint32."""
        return np.uint16 if self.size <= 2**16 else np.uint32

    @property
    def digest(self) -> str:
        """Names the contents: the same tokens for the same text."""
        whole = f"{self.end_id} {self.begin_id} {self.tokenizer.to_str()}"
        return hashlib.sha256(whole.encode()).hexdigest()


def load_vocabulary(
    source: str | os.PathLike[str] | HfTokenizer,
    *,
    end_of_text: str | None = None,
    bos: bool = False,
) -> Vocabulary:
    """The vocabulary of a model, or of a ``tokenizer.json``.

    Args:
        source: What ``ptx.load_tokenizer`` takes (a folder, a file, a repository), or its result.
        end_of_text: Token that ends a document. None: the end-of-sequence token that the files
            name, else `END_OF_TEXT` if it is an entry.
        bos: Begin each document with the beginning-of-sequence token too.

    Raises:
        ValueError: It has no such token; as ``ptx.load_tokenizer``.
    """
    found = source if isinstance(source, HfTokenizer) else load_tokenizer(source)
    end: int | None = found.eos_id
    if end_of_text is not None or end is None:
        end = found.tokenizer.token_to_id(END_OF_TEXT if end_of_text is None else end_of_text)
    if end is None:
        raise ValueError(
            f"load_vocabulary: {found.files} has no token {end_of_text or END_OF_TEXT!r} and names"
            " no eos_token; pass the token that ends a text, as end_of_text"
        )
    if bos and found.bos_id is None:
        raise ValueError(f"load_vocabulary: {found.files} names no bos_token; leave bos out")
    return Vocabulary(found.tokenizer, end, found.bos_id if bos else None, found.vocab_size)


def encode(texts: list[str], vocabulary: Vocabulary) -> Iterator[npt.NDArray[np.int64]]:
    """Each text's ids, begun and ended by exactly one special token.

    Nothing else is added, whatever the tokenizer's post-processor would. Names of special tokens
    in the text become those tokens; a text that ends with one isn't ended again.
    """
    begin, end = vocabulary.begin_id, vocabulary.end_id
    for encoded in vocabulary.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids: Any = encoded.ids
        first = [] if begin is None or ids[:1] == [begin] else [begin]
        last = [] if ids[-1:] == [end] else [end]
        yield np.array([*first, *ids, *last], dtype=np.int64)


def write_tokens(
    documents: Iterable[tuple[bool, str]],
    vocabulary: Vocabulary,
    train: TokenFile,
    valid: TokenFile,
    say: Callable[[str], None] | None = None,
) -> tuple[int, int]:
    """Appends each document's tokens to one of two files.

    Args:
        documents: (whether it is held out, its text).
        vocabulary: That the text is encoded with.
        train: Gets those that are not held out.
        valid: Gets those that are.
        say: Told how far it is, every 10 s.

    Returns:
        How many documents went to ``train`` and to ``valid``.

    Memory: a batch of some 8 million characters, or one document that is longer.
    """
    counts, said = [0, 0], time.monotonic()
    for batch in _batches(documents):
        encoded = encode([text for _, text in batch], vocabulary)
        parts: list[list[npt.NDArray[np.int64]]] = [[], []]
        for (held_out, _), ids in zip(batch, encoded, strict=True):
            parts[held_out].append(ids)
            counts[held_out] += 1
        for file, part in zip((train, valid), parts, strict=True):
            if part:
                file.append(np.concatenate(part))
        if say and time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            millions = (train.length + valid.length) / 1e6
            say(f"tokenised {sum(counts):,} documents, {millions:,.1f} M tokens so far")
    return counts[0], counts[1]


def hold_out(documents: Iterable[str], every: int) -> Iterator[tuple[bool, str]]:
    """Marks every ``every``-th document, from the middle of the first ``every`` on."""
    return ((i % every == (every - 1) // 2, text) for i, text in enumerate(documents))


def given(train: Iterable[str], valid: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Marks the documents that come from files of their own."""
    return chain(((False, text) for text in train), ((True, text) for text in valid))


def _batches(documents: Iterable[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    batch: list[tuple[bool, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
