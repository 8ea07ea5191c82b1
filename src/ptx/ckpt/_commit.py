"""The commit of a step, by the writer of rank 0: once all ranks' parts are there, and whole."""

from __future__ import annotations

import json
import time
from typing import Any

import xxhash

from ptx.ckpt import _disk
from ptx.ckpt._job import Shared
from ptx.ckpt._lock import still_held

WHOLE_SECONDS = 10.0  # at a URL such as file:// a part may be seen before all of it is written


def commit(shared: Shared, job: Any, body: bytes, dcp: bytes) -> None:
    """Wait for the parts, write the manifest and give the step its name.

    Args:
        shared: Of this process.
        job: Of the save.
        body: The manifest, but for what the parts say.
        dcp: The content of ``.metadata``.
    """
    store, folder = shared.store, job["folder"]
    store.write(folder, ".metadata", dcp)  # while the data is being written
    chunks = range(0, len(dcp), _disk.CHUNK_BYTES)
    sums = [xxhash.xxh3_64_hexdigest(dcp[at : at + _disk.CHUNK_BYTES]) for at in chunks]
    parts = _wait_for_parts(shared, job)
    files = [part["file"] for part in parts if part["file"]]
    files.append({"name": ".metadata", "bytes": len(dcp), "xxh3_64": sums})
    more = {
        "files": files,
        "parts": _union([part["parts"] for part in parts], "parts"),
        "per_rank": [part["per_rank"] for part in parts],
        "meshes": [part["mesh"] for part in parts],
    }
    # The body may hold many MB of tensor index: spliced as text, not parsed.
    whole = body[:-1] + b"," + json.dumps(more).encode()[1:]

    def may() -> None:
        # A job that took the root over has begun where it found it.
        if not still_held(store.lock_file(), shared.config["lock"]):
            raise RuntimeError("another job has taken the root over")

    names = [_disk.rank_file(rank) for rank in range(len(parts))]
    store.commit(folder, job["step"], _disk.seal(whole), names, may)


def _wait_for_parts(shared: Shared, job: Any) -> list[Any]:
    start, own, whole_by, world_size = time.monotonic(), 0.0, 0.0, job["world_size"]
    store, folder = shared.store, job["folder"]
    while True:
        names = store.names(folder)
        if aborted := sorted(name for name in names if name.startswith("abort-")):
            raise RuntimeError(f"aborted by {', '.join(aborted)}")
        missing = [rank for rank in range(world_size) if _disk.rank_file(rank) not in names]
        shared.go_on(job)
        now = time.monotonic()
        if not missing:
            whole_by = whole_by or now + WHOLE_SECONDS
            try:
                return [
                    _disk.unseal(f"{store.path(folder)}/{name}", store.read(folder, name))
                    for name in map(_disk.rank_file, range(world_size))
                ]
            except _disk.DamagedError:
                if now > whole_by:
                    raise
        own = own or (0.0 if 0 in missing else now)
        patience = shared.config["orphan_seconds" if shared.alone else "commit_seconds"]
        if own and now > max(own, shared.alone) + patience:
            raise RuntimeError(f"the parts of ranks {missing[:8]} didn't arrive in time")
        shortest, longest = store.look_seconds
        time.sleep(max(shortest, min(longest, (now - start) / 100)))


def _union(trees: list[Any], where: str) -> Any:
    """Of what the ranks hold of a model: names may be on some only, what several have is equal."""
    merged: Any = {}
    for tree in trees:
        for key, value in tree.items():
            if key not in merged:
                merged[key] = value
            elif isinstance(value, dict) and isinstance(merged[key], dict) and "$" not in value:
                merged[key] = _union([merged[key], value], f"{where}.{key}")
            elif merged[key] != value:
                raise RuntimeError(f"ranks disagree on {where}.{key}: {merged[key]} and {value}")
    return merged
