"""Read a state for a save: its tensors, its other values as JSON, and hashes to compare over ranks."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptx.ckpt import _disk
from ptx.ckpt._encode import encode
from ptx.ckpt._layout import mesh_of
from ptx.ckpt._parts import Part, local_part

HASH_MASK = 2**63 - 1  # hashes travel as int64


@dataclass
class Prepared:
    """A state at one moment: values copied, as text; tensors by reference.

    Attributes:
        keys: Of the state, in order.
        tensors: By full name.
        equal: JSON of each key that all ranks have alike.
        split: JSON of each key whose names are spread over ranks.
        own: JSON of each key that differs by rank.
        hashes: Of each key in ``equal`` and ``split``, its compared tensors included.
        digests: Of the compared tensors of ``split`` keys.
        meta: JSON of the caller's meta.
    """

    keys: list[str]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    equal: dict[str, str] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    meta: str = "null"

    def agreed(self) -> dict[str, int]:
        """What has to be the same on all ranks: by key a hash, or else of which kind it is."""
        return {
            key: self.hashes[key] if key in self.equal else key in self.own for key in self.keys
        }

    def hash_of(self, hashes: Mapping[str, int]) -> int:
        text = repr(sorted(hashes.items()))
        return xxhash.xxh3_64_intdigest(text.encode()) & HASH_MASK

    def body(
        self, step: int, attempt: str, ranks: int, split_is_equal: bool, index: bytes
    ) -> bytes:
        """The manifest, but for what is known only when all files are written."""
        values = {**self.equal, **(self.split if split_is_equal else {})}
        head = {"format": _disk.FORMAT, "step": step, "attempt": attempt, "world_size": ranks}
        text = json.dumps({**head, "keys": self.keys})[:-1]
        text += f', "meta": {self.meta}, "values": {_joined(values)}, "tensors": '
        return text.encode() + index + b"}"

    def own_section(self, split_is_equal: bool) -> bytes:
        """What this rank's part says beside its file."""
        split = {} if split_is_equal else self.split
        mesh = json.dumps(mesh_of(self.tensors.values()))
        text = f'{{"parts": {_joined(split)}, "per_rank": {_joined(self.own)}, "mesh": {mesh}}}'
        return text.encode()


def prepare(parts: Mapping[str, Part], meta: Any, rank: int) -> Prepared:
    """Read ``parts``.

    Raises:
        ValueError: Values that would have to be pickled, by name; names that collide.

    Cost: a walk over the state, and a hash of the plain tensors that ranks have to agree on.
    """
    ready = Prepared(list(parts))
    in_meta: dict[str, Tensor] = {}
    ready.meta = json.dumps(encode(meta, "meta", in_meta))
    if in_meta:
        raise ValueError(f"save: meta has tensors, {sorted(in_meta)[:8]}; put them into the state")
    for key, part in parts.items():
        found: dict[str, Tensor] = {}
        prefix = f"{key}.{rank}" if part.per_rank else key
        state, notes = part.read()
        tree = encode(state, prefix, found)
        if part.per_rank:
            ready.own[key] = json.dumps(tree)
        else:
            text = json.dumps({"tree": tree, "notes": encode(notes, "notes", {})})
            (ready.split if part.split else ready.equal)[key] = text
            dot = prefix + "."
            plain = [n.removeprefix(dot) for n, t in found.items() if not isinstance(t, DTensor)]
            digests = _digests({dot + name: found[dot + name] for name in part.compared(plain)})
            if part.split:
                ready.digests |= digests
            # Ranks may have filled equal dicts in another order.
            ordered = text if part.split else json.dumps(tree, sort_keys=True)
            known = f"{ordered}{sorted(digests.items())}"
            ready.hashes[key] = xxhash.xxh3_64_intdigest(known.encode()) & HASH_MASK
        if meta_names := [name for name, t in found.items() if t.is_meta]:
            raise ValueError(
                f"save: {meta_names[0]!r} is on meta, without values; call materialize first"
            )
        if clash := ready.tensors.keys() & found.keys():
            raise ValueError(f"save: two tensors are called {sorted(clash)[0]!r}; rename a key")
        ready.tensors |= found
    return ready


def _joined(texts: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "}"


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A hash of each tensor's bits, dtype and shape."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        plain = local_part(tensor).resolve_conj().resolve_neg()
        # as_strided: a single value of any stride is contiguous, and yet has no view as bytes.
        data = plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)
        by_device.setdefault(data.device, {})[name] = data
    found = {}
    for device, some in by_device.items():
        if device.type != "cpu":  # one copy, not one for each
            whole = torch.cat(list(some.values())).cpu()
            some = dict(zip(some, whole.split([data.numel() for data in some.values()])))
        for name, data in some.items():
            hasher = xxhash.xxh3_64(f"{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
            if data.numel():
                hasher.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
            found[name] = hasher.intdigest() & HASH_MASK
    return found
