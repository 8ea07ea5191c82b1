"""A committed step, as its manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._encode import decode, dtype_of
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
        ValueError: A newer format than this version of ptx reads.
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

    def trees(self, key: str, rank: int) -> tuple[Any, Any]:
        """A key's values, without tensors, and its notes; ``rank``: whose, if it differs by rank."""
        if key in self.manifest["values"]:
            found = self.manifest["values"][key]
        elif key in self.manifest["parts"]:
            found = self.manifest["parts"][key]
        else:
            return self.manifest["per_rank"][rank][key], {}
        return found["tree"], decode(found["notes"], "notes", {})
