"""What a manifest has to look like before anything in it is believed; without torch."""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from typing import Any

from ptx.ckpt import _disk

DATA_FILE = re.compile(r"rank-([0-9]{5,})\.distcp")
CHECKSUM = re.compile(r"[0-9a-f]{16}")
ALIGN = 64  # of a tensor's values in a file
INT64 = 2**63


def check_manifest(file: str, manifest: Any, step: int) -> None:
    """Raise `_disk.DamagedError` unless a manifest is one that `save` could have written.

    Its checksum tells only that it is as someone wrote it. With this a stranger's can't name files
    elsewhere, bytes that aren't there, or values that nothing fills.

    Args:
        file: For messages.
        manifest: Its value.
        step: The number in the name of its folder.
    """
    try:
        _check(manifest, step)
    except _Wrong as problem:
        raise _disk.DamagedError(file, 0, str(problem)) from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
        text = f"it isn't a checkpoint's manifest ({type(problem).__name__}: {problem})"
        raise _disk.DamagedError(file, 0, text) from None


class _Wrong(Exception):
    pass


def _check(manifest: Any, step: int) -> None:
    _need(type(manifest) is dict, "it isn't a checkpoint's manifest")
    _need(_is_int(manifest["format"], 1), f"its format is {manifest['format']!r}")
    _need(type(manifest["attempt"]) is str, "its attempt has no name")
    _need(manifest["step"] == step, f"it is that of step {manifest['step']!r}, not {step}")
    _need(_is_int(manifest["world_size"], 1), "its world_size is no number of ranks")
    _need(_are(str, manifest["keys"]), "its keys aren't names")
    sizes = _file_sizes(manifest)
    if manifest["format"] > _disk.FORMAT:
        return  # what else is in it only a newer ptx knows
    _check_values(manifest)
    _need(type(manifest["tensors"]) is dict, "its tensors have no names")
    for name, tensor in manifest["tensors"].items():
        dtype, shape, chunks = tensor
        _need(type(dtype) is str, f"the dtype of {name!r} is {dtype!r}")
        _need(
            type(shape) is list and all(_is_int(n, 0) for n in shape),
            f"the shape of {name!r} is {shape!r}",
        )
        _check_chunks(name, shape, chunks, sizes)


def _file_sizes(manifest: Any) -> dict[int, int]:
    """Bytes of each rank's data file."""
    sizes: dict[int, int] = {}
    names = set()
    _need(type(manifest["files"]) is list, "its files are no list")
    for entry in manifest["files"]:
        name, nbytes, sums = entry["name"], entry["bytes"], entry["xxh3_64"]
        _need(type(name) is str, f"{name!r} is no file's name")
        match = DATA_FILE.fullmatch(name)
        rank = int(match[1]) if match else -1
        known = name == ".metadata" or (
            rank < manifest["world_size"] and name == _disk.data_file(rank)
        )
        _need(known and name not in names, f"{name!r} is no file of a checkpoint, or there twice")
        _need(_is_int(nbytes, 1), f"{name} has {nbytes!r} bytes")
        count = -(-nbytes // _disk.CHUNK_BYTES)
        _need(
            _are(str, sums) and len(sums) == count and all(map(CHECKSUM.fullmatch, sums)),
            f"{name} has no checksum for each of its {count} chunks",
        )
        names.add(name)
        if match:
            sizes[rank] = nbytes
    return sizes


def _check_values(manifest: Any) -> None:
    values, parts, own = manifest["values"], manifest["parts"], manifest["per_rank"]
    _need(
        type(own) is list and len(own) == len(manifest["meshes"]) == manifest["world_size"],
        "it doesn't tell what each rank has",
    )
    _need(all(each.keys() == own[0].keys() for each in own), "its ranks have different keys")
    found = sorted([*values, *parts, *own[0]])
    _need(found == sorted(manifest["keys"]), f"its keys {manifest['keys']} aren't those it holds")
    for key, one in [*values.items(), *parts.items()]:
        _need(one.keys() == {"tree", "notes"}, f"{key!r} has no values")
        notes = one["notes"]
        _need(type(notes) is dict and "$" not in notes, f"{key!r} has no notes")
        _need(
            all(_are(str, names) for names in notes.get("tied", {}).values())
            and type(notes.get("extra", {})) is dict
            and all(type(group) is str for group in notes.get("group_of", {}).values()),
            f"{key!r} has notes that make no sense",
        )


def _check_chunks(name: str, shape: list[int], chunks: Any, sizes: dict[int, int]) -> None:
    filled = 0
    for rank, start, offsets, lengths in chunks:
        fits = len(offsets) == len(lengths) == len(shape) and all(
            _is_int(a, 0) and _is_int(n, 1) and a + n <= size
            for a, n, size in zip(offsets, lengths, shape)
        )
        _need(fits, f"{name!r} of shape {shape} has no values at {offsets}, {lengths}")
        _need(type(rank) is int and rank in sizes, f"{name!r} is in the file of no rank, {rank!r}")
        inside = _is_int(start, 0) and start % ALIGN == 0 and start < sizes[rank]
        _need(inside, f"{name!r} is at byte {start!r} of {sizes[rank]} of {_disk.data_file(rank)}")
        filled += prod(lengths)
    _need(filled == prod(shape), f"{name!r} has {filled} of its {prod(shape)} values")
    _need(_are_apart(chunks, shape), f"{name!r} has some of its values twice, and others not")


def _are_apart(chunks: Any, shape: list[int]) -> bool:
    """Whether no two boxes overlap; compares only those that meet in the most divided dim."""
    if len(chunks) < 2:
        return True
    dims = range(len(shape))
    dim = max(dims, key=lambda d: len({offsets[d] for _, _, offsets, _ in chunks}), default=None)
    if dim is None:
        return False
    boxes = sorted((offsets[dim], offsets, lengths) for _, _, offsets, lengths in chunks)
    if all(a + m[dim] <= b for (a, _, m), (b, _, _) in pairwise(boxes)):
        return True
    for i, (_, offsets, lengths) in enumerate(boxes):
        for start, others, sizes in boxes[i + 1 :]:
            if start >= offsets[dim] + lengths[dim]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, lengths, others, sizes)):
                return False
    return True


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < INT64


def _are(kind: type, values: Any) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise[:500])
