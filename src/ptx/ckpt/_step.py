"""A committed step, as its manifest describes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._encode import Named, decode, dtype_of
from ptx.ckpt._layout import Box
from ptx.ckpt._parts import Spec


@dataclass(frozen=True)
class Chunk:
    """A box of a saved tensor: the file of ``rank`` has its values from byte ``start`` on."""

    rank: int
    start: int
    box: Box


class Step:
    """A committed step as its manifest describes it.

    Args:
        folder: Where it is.
        manifest: The value of its manifest.

    Raises:
        ValueError: A newer format than this version of ptx reads, or an unknown dtype.
        _disk.DamagedError: Values that can't be read, or don't belong to the tensors.
    """

    def __init__(self, folder: str, manifest: Any) -> None:
        if manifest["format"] > _disk.FORMAT:
            raise ValueError(
                f"load: {folder} has format {manifest['format']}, this version of ptx reads up to"
                f" {_disk.FORMAT}; update ptx"
            )
        self.folder = folder
        self.manifest = manifest
        self.number: int = manifest["step"]
        self.world_size: int = manifest["world_size"]
        self.keys: list[str] = manifest["keys"]  # of the state
        self.own = set(manifest["per_rank"][0])  # those that differ by rank
        self.files = {entry["name"]: entry for entry in manifest["files"]}
        self.tensors: dict[str, Spec] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        for name, (dtype, shape, chunks) in manifest["tensors"].items():
            self.tensors[name] = Spec(dtype_of(dtype), tuple(shape))
            self.chunks[name] = [
                Chunk(rank, start, (tuple(offsets), tuple(sizes)))
                for rank, start, offsets, sizes in chunks
            ]
        self._check()

        # What modules keep beside tensors, by full name.
        self.extras = [
            f"{key}.{name}"
            for key in self.keys
            if key not in self.own
            for name in self.trees(key, 0)[1].get("extra", ())
        ]

    @property
    def meta(self) -> Any:
        return decode(self.manifest["meta"], "meta", {})

    def _check(self) -> None:
        """Read all values once, before any tensor is written."""
        file = os.path.join(self.folder, _disk.MANIFEST)
        by_file = {_disk.data_file(c.rank): 0 for some in self.chunks.values() for c in some}
        for name, some in self.chunks.items():
            for chunk in some:
                data_file = _disk.data_file(chunk.rank)
                stop = chunk.start + prod(chunk.box[1]) * self.tensors[name].dtype.itemsize
                by_file[data_file] = max(by_file[data_file], stop)
        for data_file, stop in by_file.items():
            if stop > self.files[data_file]["bytes"]:
                raise _disk.DamagedError(file, 0, f"{data_file} doesn't hold all of its tensors")
        named = Named()
        try:
            decode(self.manifest["meta"], "meta", {})
            for key in self.keys:
                for rank in range(self.world_size if key in self.own else 1):
                    decode(
                        self.trees(key, rank)[0], f"{key}.{rank}" if key in self.own else key, named
                    )
        except Exception as problem:
            raise _disk.DamagedError(file, 0, f"its values can't be read: {problem!r}") from None
        if odd := sorted(named.found ^ self.tensors.keys()):
            raise _disk.DamagedError(file, 0, f"its values and tensors don't match: {odd[:8]}")

    def trees(self, key: str, rank: int) -> tuple[Any, Any]:
        """A key's values, without tensors, and its notes; ``rank``: whose, if it differs by rank."""
        if key in self.manifest["values"]:
            found = self.manifest["values"][key]
        elif key in self.manifest["parts"]:
            found = self.manifest["parts"][key]
        else:
            return self.manifest["per_rank"][rank][key], {}
        return found["tree"], decode(found["notes"], "notes", {})
