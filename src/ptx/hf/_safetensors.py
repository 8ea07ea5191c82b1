"""Headers of safetensors files, read and written by hand: where each tensor's bytes are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# As the safetensors library; a longer one isn't a header.
_MAX_HEADER = 100_000_000
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """One tensor in a file.

    Args:
        key: Its name there.
        file: The file.
        dtype: Of the bytes.
        shape: Of the whole tensor.
        start: Where its bytes begin, from the start of the file. They are in row-major order.
    """

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> list[Entry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Every number is checked against the file's size, so an unfinished download is noticed here.

    Raises:
        ValueError: It can't be read, or isn't a whole safetensors file; names it.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes doesn't fit into {size}")
            header = json.loads(stream.read(length), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        header.pop("__metadata__", None)
        entries = [_entry(key, value, file, 8 + length) for key, value in header.items()]
        entries.sort(key=lambda entry: entry.start)
        _check_bytes(entries, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    return entries


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What a file begins with before the bytes of these tensors, which follow without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(key: str, value: Any, file: Path, data: int) -> Entry:
    wrong = f"the entry of {key!r} is {value!r}"
    if not isinstance(value, dict) or value.get("dtype") not in DTYPES:
        raise ValueError(f"{wrong}, which has no dtype of {', '.join(DTYPES)}")
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{wrong}, without a shape and two offsets")
    entry = Entry(key, file, DTYPES[value["dtype"]], tuple(shape), data + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise ValueError(f"{wrong}, but this shape takes {entry.nbytes} bytes")
    return entry


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_bytes(entries: list[Entry], data: int, size: int) -> None:
    end = data
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"the bytes of {entry.key!r} begin at {entry.start}, not at {end}")
        end += entry.nbytes
    if end != size:
        raise ValueError(f"tensors end at byte {end}, the file at {size} (a broken download?)")
