"""What a run trains on: text, images as tokens, or random tokens, all behind one function.

`load_data` gives the tokens, `batches.TrainBatches` the samples: sample i is a function of
(seed, i), so any world size sees the same global batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from batches import IGNORE_INDEX, Tokens, TrainBatches, count_tokens, validation_batches
from hub_dataset import HubFiles, download, find_dataset, is_repository
from images import PIXELS, find_images, image_tokens, read_idx, read_images
from ptx.hf import HfTokenizer
from sources import TextUnit, find_files
from text_data import TextOptions, content_digest, load_text
from together import of_first_rank, on_every_rank
from token_cache import TokenFile, cached_tokens, one_at_a_time
from tokenise import load_vocabulary

__all__ = [
    "CORPUS",
    "IGNORE_INDEX",
    "TOKENIZER",
    "Corpus",
    "Data",
    "Tokens",
    "TrainBatches",
    "count_tokens",
    "kind_of",
    "load_corpus",
    "load_data",
    "validation_batches",
]

CORPUS = Path(__file__).parent / "corpus" / "corpus.txt.xz"
TOKENIZER = Path(__file__).parent / "corpus" / "tokenizer.json"
HOLD_OUT = 12  # every 12th document of the corpus is held out

_RANDOM = 2**24, 2**16  # tokens to train on, and held out: 32 MB

Kind = Literal["corpus", "random", "mnist", "files", "hub"]


@dataclass(frozen=True)
class Data:
    """What a source holds.

    Args:
        train: [n] ids, to be cut into windows; each document is followed by one end token.
        valid: [m] ids that are held out.
        vocab_size: One more than the largest id there can be.
        end_id: Ends a document: for `packing.document_ids`. None: there are no documents.
        tokenizer: Of text, else None.
        digest: Names what ``train`` holds, for ``TrainBatches(digest=...)``.
    """

    train: Tokens
    valid: Tokens
    vocab_size: int
    end_id: int | None
    tokenizer: Tokenizer | None
    digest: str

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{len(self.train):,} training tokens, {len(self.valid):,} held out, vocabulary of"
            f" {self.vocab_size:,}"
        )


@dataclass(frozen=True)
class Corpus:
    train: Tokens  # [n], memory-mapped; each document is followed by one end-of-text token
    valid: Tokens
    tokenizer: Tokenizer


def load_data(
    source: str,
    cache: Path,
    *,
    valid_data: str | None = None,
    hold_out: int = HOLD_OUT,
    column: str = "text",
    text_unit: TextUnit = "file",
    data_limit: int = 0,
    split: str = "train",
    valid_split: str | None = None,
    hub_files: str | None = None,
    data_revision: str | None = None,
    tokenizer: str | os.PathLike[str] | HfTokenizer = TOKENIZER,
    end_of_text: str | None = None,
    bos: bool = False,
    corpus: Path = CORPUS,
    random_vocab: int = 4096,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Data:
    """Tokens to train on and to validate on, the same on every rank.

    All ranks have to call it, with equal arguments: they agree on the files, one of each host
    downloads and tokenises while the others wait, and all return, or raise, together.

    Args:
        source: "corpus": the embedded one. "random". "mnist:FOLDER": idx files as pixel tokens.
            A file, a folder or a glob of text, JSON lines or parquet. ``org/name``: a dataset
            repository of the Hugging Face hub.
        cache: Folder for the tokens, named by the contents they are made from.
        valid_data: Files of text that are held out, instead of a part of ``source``.
        hold_out: Else every so many documents one is held out, at least 2.
        column: Where the text is in JSON lines and parquet.
        text_unit: What a document is in text files: "file", "paragraph", "line".
        data_limit: Documents (images) to read at most; 0: all.
        split: Of a repository.
        valid_split: Of a repository, to be held out.
        hub_files: Glob of the repository's files, instead of a split.
        data_revision: Branch, tag or commit of the repository.
        tokenizer: Folder, file or repository with a ``tokenizer.json``.
        end_of_text: Token that ends a document; None: the tokenizer's own.
        bos: Whether the tokenizer's beginning-of-sequence token begins each document.
        corpus: Text in the form of corpus/SOURCE.md, for "corpus".
        random_vocab: Of random tokens.
        seed: Of random tokens.
        say: Told of downloads and of progress, by the one rank of a host that does the work.

    Raises:
        ValueError: The source isn't there, isn't what it should be, or has too few documents; the
            hub can't be reached (nothing else takes its place); ranks have different files.
        OSError: The cache's disk is full.

    Cost: the source's files are read once at every start, for their digest. Tokenising uses all
    cores; a source that takes longer than the process group's timeout is better tokenised before,
    by one process on each host that calls this.
    """
    options = TextOptions(column, text_unit, data_limit, hold_out)
    if hold_out < 2 or data_limit < 0:
        raise ValueError(
            f"load_data: hold_out={hold_out} must be at least 2, data_limit={data_limit} at least 0"
        )

    # What is a file on one host may not be there on another: the first rank decides for all.
    def find() -> tuple[Kind, list[HubFiles]]:
        kind = kind_of(source)
        if valid_data is not None and (kind not in ("files", "hub") or valid_split is not None):
            raise ValueError(
                f"load_data: valid_data={valid_data!r} is for a source of files or a repository without"
                f" valid_split; this is {source!r} with valid_split={valid_split!r}"
            )
        splits = [split] if valid_split is None else [split, valid_split]
        files = [hub_files, None]  # a glob is for the split to train on
        return kind, [
            find_dataset(source, split=name, files=glob, revision=data_revision)
            for name, glob in zip(splits, files)
            if kind == "hub"
        ]

    def load() -> Data:
        if kind == "random":
            return _random(random_vocab, seed)
        if kind == "mnist":
            return _images(Path(source.partition(":")[2]).expanduser(), cache, data_limit)
        files, held_out = [corpus], None
        how = options
        if kind == "corpus":
            how = replace(options, unit="named line")
        elif kind == "hub":
            files, *rest = (_downloaded(found, cache, say) for found in hub)
            held_out = rest[0] if rest else None
        else:
            files = find_files(source)
        if valid_data is not None:
            held_out = find_files(valid_data)
        vocabulary = load_vocabulary(tokenizer, end_of_text=end_of_text, bos=bos)
        train, validation, digest = load_text(files, held_out, cache, vocabulary, how, say)
        return Data(
            train, validation, vocabulary.size, vocabulary.end_id, vocabulary.tokenizer, digest
        )

    kind, hub = of_first_rank(find)
    return on_every_rank(load, lambda data: data.digest)


def kind_of(source: str) -> Kind:
    """What kind of source it is; see `load_data`.

    Raises:
        ValueError: It is none.
    """
    if source == "corpus":
        return "corpus"
    if source == "random":
        return "random"
    if source.startswith("mnist:"):
        return "mnist"
    if Path(source).expanduser().exists() or any(sign in source for sign in "*?["):
        return "files"
    if is_repository(source):
        return "hub"
    hint = "; say where MNIST's files are: mnist:FOLDER" if source == "mnist" else ""
    raise ValueError(
        f"load_data: {source!r} is no file, folder or glob here, no dataset repository (org/name),"
        f" and none of corpus, random, mnist:FOLDER{hint}"
    )


def load_corpus(cache: Path, *, corpus: Path = CORPUS, tokenizer: Path = TOKENIZER) -> Corpus:
    """The corpus (format: corpus/SOURCE.md), tokenised once and mapped from ``cache``."""
    vocabulary = load_vocabulary(tokenizer)
    options = TextOptions(unit="named line")
    train, valid, _ = load_text([corpus], None, cache, vocabulary, options)
    return Corpus(train, valid, vocabulary.tokenizer)


def _random(vocab_size: int, seed: int) -> Data:
    """Token i depends on (seed, i) alone."""
    if vocab_size < 2:
        raise ValueError(f"load_data: random_vocab={vocab_size} must be at least 2")
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    train, valid = (
        np.random.default_rng((seed, part)).integers(vocab_size, size=size, dtype=dtype)
        for part, size in enumerate(_RANDOM)
    )
    return Data(train, valid, vocab_size, None, None, f"random-{vocab_size}-{seed}")


def _images(folder: Path, cache: Path, limit: int) -> Data:
    files = find_images(folder)
    digest = content_digest(files, {"images": "class, pixels, end", "limit": limit})
    # Read again at every start: labels are small, and say how large the vocabulary is.
    n_classes = max(int(read_idx(labels).max()) for labels in files[1::2]) + 1

    def make(train: TokenFile, valid: TokenFile) -> None:
        for tokens, part in ((train, files[:2]), (valid, files[2:])):
            tokens.append(image_tokens(read_images(*part, limit=limit), n_classes))

    train, valid = cached_tokens(cache, digest, np.uint16, make)
    return Data(train, valid, PIXELS + n_classes + 1, PIXELS + n_classes, None, digest)


def _downloaded(found: HubFiles, cache: Path, say: Callable[[str], None] | None) -> list[Path]:
    """One process of a host downloads; those after it find the files in huggingface_hub's cache."""
    with one_at_a_time(cache / f".{found.repo.replace('/', '--')}.lock"):
        return download(found, say)
