"""Read every byte of a checkpoint and compare it with the checksums written with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ptx.ckpt import _disk


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
        damage: By step, file and offset; of a file the first.
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
        path: A step's folder (``runs/a/step-500``), or the root that holds them.

    Returns:
        A report; ``report.ok``, ``report.damage`` and ``print(report)``.

    Raises:
        ValueError: There is no checkpoint at ``path``.

    Cost: one read of all bytes, on one core.
    """
    name = os.path.basename(os.path.abspath(path))
    if match := _disk.STEP.fullmatch(name):
        folders = {int(match[1]): str(path)} if Path(path).is_dir() else {}
    else:
        folders = _disk.step_folders(str(path)) if Path(path).is_dir() else {}
    if not folders:
        raise ValueError(f"verify: {path} is no step-N folder, and holds none")
    damage: list[Damage] = []
    total = 0
    for step, folder in folders.items():
        try:
            _, manifest = _disk.read_manifest(folder)
        except _disk.DamagedError as error:
            damage.append(Damage(step, error.file, error.offset, error.reason))
            continue
        for entry in manifest["files"]:
            try:
                _disk.check_chunks(folder, entry)
                total += entry["bytes"]
            except _disk.DamagedError as error:
                damage.append(Damage(step, error.file, error.offset, error.reason))
    return VerifyReport(tuple(folders), tuple(damage), total)
