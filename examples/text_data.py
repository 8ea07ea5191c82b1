"""Tokens of text files: read, split, tokenised and cached under a digest of all that decides them."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import xxhash

from batches import Tokens
from sources import TextUnit, read_documents
from token_cache import TokenFile, cached_tokens
from tokenise import Vocabulary, given, hold_out, write_tokens

_FORMAT = 2  # of the cached files; another number makes them anew
_CHUNK = 2**24  # bytes read at once


@dataclass(frozen=True)
class TextOptions:
    """What decides the documents, beside the files.

    Args:
        column: Where the text is in JSON lines and parquet.
        unit: What a document is in text files; "named line" in the embedded corpus.
        limit: Documents to read at most; 0: all.
        hold_out_every: Every so many documents one is held out.
    """

    column: str = "text"
    unit: TextUnit | Literal["named line"] = "file"
    limit: int = 0
    hold_out_every: int = 12


def load_text(
    files: Sequence[Path],
    held_out: Sequence[Path] | None,
    cache: Path,
    vocabulary: Vocabulary,
    options: TextOptions,
    say: Callable[[str], None] | None = None,
) -> tuple[Tokens, Tokens, str]:
    """Tokens to train on and to validate on, and the digest of the former.

    Args:
        files: In order; contents count, names and places don't.
        held_out: Files to validate on; None: a part of ``files``.
        cache: Folder for the tokens.
        vocabulary: That the text is encoded with.
        options: How the files are read and split.
        say: Told of the work, if there is any.

    Raises:
        ValueError: Too few documents to split, or a file that can't be read.
        OSError: The cache's disk is full.

    Cost: reads all files once, for the digest.
    """
    decides = asdict(options) | {"vocabulary": vocabulary.digest}
    if held_out is not None:
        decides["hold_out_every"] = None
    digest = key = content_digest(files, decides)
    if held_out is not None:
        key = f"{digest}-{content_digest(held_out, {})}"

    def make(train: TokenFile, valid: TokenFile) -> None:
        if say:
            say(f"tokenising {_described(files)} into {cache}")
        documents = islice(_read(files, options), options.limit or None)
        if held_out is None:
            marked = hold_out(documents, options.hold_out_every)
        else:
            marked = given(documents, _read(held_out, options))
        counts = write_tokens(marked, vocabulary, train, valid, say)
        _check_counts(counts, held_out is not None, options)

    return *cached_tokens(cache, key, vocabulary.dtype, make), digest


def content_digest(files: Sequence[Path], decides: Mapping[str, object]) -> str:
    """Names what is made from the contents of ``files``, in this order, and from ``decides``."""
    contents = []
    for file in files:
        content = xxhash.xxh3_128()
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                content.update(chunk)
        contents.append(content.hexdigest())
    whole = {"format": _FORMAT, "files": contents, **decides}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


def read_corpus(corpus: Path) -> Iterator[str]:
    """Reads one document a line, each after its name and a tab."""
    with lzma.open(corpus, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\n").split("\t", 1)[1]


def _read(files: Iterable[Path], options: TextOptions) -> Iterator[str]:
    if options.unit == "named line":
        return (document for file in files for document in read_corpus(file))
    return read_documents(files, column=options.column, unit=options.unit)


def _check_counts(counts: tuple[int, int], is_given: bool, options: TextOptions) -> None:
    if is_given:
        if not all(counts):
            raise ValueError(
                f"load_text: {counts[0]} documents to train on and {counts[1]} to validate on; there"
                " must be some of both"
            )
        return
    # One from the middle of each so many is held out, and one at least has to be left.
    needed = max((options.hold_out_every - 1) // 2 + 1, 2)
    if sum(counts) < needed:
        raise ValueError(
            f"load_text: {_counted(sum(counts), 'document')} can't be split: to hold out one of every"
            f" {options.hold_out_every}, at least {needed} are needed. Let a paragraph or a line of"
            " text files be a document (--text-unit), name a file to validate on (--valid-data), or"
            " hold out more often (--hold-out)"
        )


def _described(files: Sequence[Path]) -> str:
    size = sum(file.stat().st_size for file in files)
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    return f"{_counted(len(files), 'file')}, {amount},"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
