"""The tensors of a model's folder, whether in one safetensors file or in several with an index."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx.hf._safetensors import Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """What is on file: entries by key, and the configuration that lies beside them.

    Args:
        path: The folder, or the file if one was given.
        entries: By their names in the file.
        config: ``config.json``, or empty.
    """

    path: Path
    entries: dict[str, Entry]
    config: dict[str, Any]

    def fingerprint(self) -> str:
        """Equal on two ranks that see the same tensors at the same places."""
        described = [
            (e.key, e.file.name, str(e.dtype), e.shape, e.start) for e in self.entries.values()
        ]
        return hashlib.sha256(repr(sorted(described)).encode()).hexdigest()


def open_source(path: Path) -> Source:
    """Reads the headers of a folder's safetensors files; those that its index names, if any.

    Raises:
        ValueError: There are none, one isn't whole, or the index doesn't agree with them.
    """
    if path.is_file():
        return Source(path, _merged([path]), {})
    config = _json(path / "config.json") if (path / "config.json").is_file() else {}
    # The order in which transformers looks for them.
    if (path / SINGLE).is_file():
        return Source(path, _merged([path / SINGLE]), config)
    if (path / INDEX).is_file():
        return Source(path, _indexed(path), config)
    others = sorted(file.name for file in path.glob("*.bin")) or sorted(
        file.name for file in path.glob("*.safetensors")
    )
    found = f", only {', '.join(others[:3])}" if others else ""
    raise ValueError(
        f"{path} has no {SINGLE} and no {INDEX}{found}; save the model with save_pretrained of"
        " transformers, or name the one file"
    )


def _indexed(path: Path) -> dict[str, Entry]:
    places = _json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(n, str) for n in places.values()):
        raise ValueError(f"{path / INDEX} has no weight_map from names to files")
    names = dict.fromkeys(places.values())
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{path / INDEX} names files outside of its folder: {outside}")
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(
            f"{path} lacks {', '.join(absent)}, which its index names (a broken download?)"
        )
    entries = _merged([path / name for name in names])
    wrong = [
        f"{key} in {name}"
        for key, name in places.items()
        if key not in entries or entries[key].file.name != name
    ]
    if wrong:
        raise ValueError(f"{path / INDEX} names what isn't there: {', '.join(wrong[:10])}")
    return entries


def _merged(files: list[Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.key in entries:
                first = entries[entry.key].file.name
                raise ValueError(f"{entry.key} is in two files, {first} and {file.name}")
            entries[entry.key] = entry
    return entries


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is no JSON object")
    return value
