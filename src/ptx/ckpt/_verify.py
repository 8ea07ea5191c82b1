"""Read every byte of a checkpoint and compare it with the checksums written with it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ptx.ckpt import _disk
from ptx.ckpt._store import ATTEMPT, Store, is_url, open_store


@dataclass(frozen=True)
class Damage:
    """One thing that isn't what was written."""

    step: int
    file: str
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.file}, byte {self.offset}: {self.reason}"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        steps: That were looked at, ascending.
        damage: By step, file and offset; each chunk of 4 MiB on its own.
        bytes: That were read and compared.
    """

    steps: tuple[int, ...]
    damage: tuple[Damage, ...]
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.damage

    def __str__(self) -> str:
        what = f"{len(self.steps)} steps, {self.bytes / 2**20:.0f} MiB"
        return "\n".join([f"{what}: {'whole' if self.ok else 'damaged'}", *map(str, self.damage)])


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Verify one step, or all steps of a run, by reading them whole.

    Works anywhere the files are, without torch.distributed; nothing is changed.

    Args:
        path: A step's folder (``runs/a/step-500``), or the root that holds them; or the URL of one.

    Returns:
        A report; ``report.ok``, ``report.damage`` and ``print(report)``.

    Raises:
        ValueError: There is no checkpoint at ``path``.

    Cost: one read of all bytes, on one core.
    """
    store, folders = find_steps(path)
    if not folders:
        raise ValueError(f"verify: {path} is no step-N folder, and holds none")
    damage: list[Damage] = []
    total = 0
    for step, folder in reversed(folders):
        with store.reading(folder):
            found, size = _verify_step(store, step, folder)
        damage += found
        total += size
    return VerifyReport(tuple(sorted({step for step, _ in folders})), tuple(damage), total)


def find_steps(path: str | os.PathLike[str]) -> tuple[Store, list[tuple[int, str]]]:
    """The store, and the steps at ``path``: itself, or those in it, the newest first."""
    text = os.fspath(path).rstrip("/") if is_url(path) else os.path.abspath(path)
    parent, _, name = text.rpartition("/")
    if match := (ATTEMPT if is_url(path) else _disk.STEP).fullmatch(name):
        store = open_store(parent)
        inner = open_store(text)  # a root may have such a name, too
        if store.has_manifest(text) or not (inner.content() and inner.folders()):
            return store, [(int(match[1]), text)] if store.is_there(text) else []
    store = open_store(text)
    return store, store.folders() if store.content() is not None else []


def _verify_step(store: Store, step: int, folder: str) -> tuple[list[Damage], int]:
    """What is damaged, chunk by chunk, and the bytes that are whole."""
    try:
        _, manifest = store.manifest(folder)
    except _disk.DamagedError as error:
        return [Damage(step, error.file, error.offset, error.reason)], 0
    damage, total = [], 0
    for entry in manifest["files"]:
        try:
            store.check_sizes(folder, {"files": [entry]})
        except _disk.DamagedError as error:
            damage.append(Damage(step, error.file, error.offset, error.reason))
            continue
        for chunk in range(len(entry["xxh3_64"])):
            try:
                store.check_chunks(folder, entry, [chunk])
                total += min(_disk.CHUNK_BYTES, entry["bytes"] - chunk * _disk.CHUNK_BYTES)
            except _disk.DamagedError as error:
                damage.append(Damage(step, error.file, error.offset, error.reason))
    return damage, total
