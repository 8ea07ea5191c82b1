"""A file system of fsspec's whose data files can be held up, in the writer process as well."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

GATE = "PTX_TEST_GATE"  # while this file exists, no data file is closed
METADATA = "Metadata-Version: 2.1\nName: gated\nVersion: 1.0\n"
ENTRY_POINTS = "[fsspec.specs]\ngated = ckpt.gated:Gated\n"


class Gated(LocalFileSystem):  # type: ignore[misc]
    """``gated:///folder``; whole when closed, as an object store's uploads."""

    protocol = "gated"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("gated://")))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(".distcp") and mode == "wb":
            while os.path.exists(os.environ[GATE]):
                time.sleep(0.005)
        return super().open(path, mode, **options)


@contextmanager
def closed_gate() -> Iterator[None]:
    """Meanwhile no data file is uploaded."""
    Path(os.environ[GATE]).touch()
    try:
        yield
    finally:
        Path(os.environ[GATE]).unlink()


def install(folder: Path, plugin: Path) -> str:
    """The URL of a new root; processes started from now on know the protocol by an entry point."""
    info = plugin / "gated-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.append(str(plugin))
    os.environ[GATE] = str(folder / "gate")
    fsspec.register_implementation("gated", Gated, clobber=True)
    return f"gated://{folder}/root"


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(GATE, "")
    return install(tmp_path, tmp_path / "plugin")
