"""Write a folder that appears under its name when all of it is on disk, or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ptx.hf._folder import INDEX
from ptx.hf._layout import File, Piece
from ptx.hf._safetensors import header_bytes

_BLOCK = 2**23  # bytes on their way to the file


@contextmanager
def fresh_draft(path: Path, where: str) -> Iterator[Path]:
    """The draft of a new folder, for one process; gone when the block ends, unless committed.

    Raises:
        ValueError: The folder exists.
    """
    if is_taken(path):
        raise ValueError(f"{where}: {path} exists; choose a new folder")
    draft = draft_name(path)
    make_draft(draft)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def is_taken(path: Path) -> bool:
    """Whether a folder can't appear here: something is, and isn't an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def draft_name(path: Path) -> Path:
    """A hidden name beside ``path``, another one at each call."""
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"


def make_draft(draft: Path) -> None:
    """Makes it, and the folders that it is to be in."""
    draft.mkdir(parents=True)


def write_file(file: Path, pieces: tuple[Piece, ...], tensors: Iterator[Tensor]) -> None:
    """Writes a safetensors file of tensors that come one by one, each as its piece says."""
    with open(file, "xb") as stream:
        stream.write(header_bytes((p.key, p.dtype, p.shape) for p in pieces))
        buffer = bytearray(_BLOCK)
        for tensor in tensors:
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            part = data[:0]
            for first in range(0, data.numel(), _BLOCK):
                part = data[first : first + _BLOCK]
                torch.frombuffer(buffer, dtype=torch.uint8)[: len(part)].copy_(part)
                stream.write(memoryview(buffer)[: len(part)])
            del tensor, data, part  # before the next one is made
        stream.flush()
        os.fsync(stream.fileno())  # by the rank that wrote: another may not see its cache


def write_index(files: list[File], draft: Path) -> None:
    """Which tensor is in which file, if there are several."""
    if len(files) == 1:
        return
    places = {piece.key: file.name for file in files for piece in file.pieces}
    total = sum(piece.nbytes for file in files for piece in file.pieces)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def commit(draft: Path, path: Path) -> None:
    """Gives a draft its name, after everything in it has reached the disk."""
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)
    os.rename(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
