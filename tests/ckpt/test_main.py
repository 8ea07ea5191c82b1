"""``python -m ptx.ckpt``: what it prints, its exit codes, and that it needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.small import Small, data_files, flip, save_filled, writer_pid
from ptx.ckpt import AsyncCheckpointer, PerRank
from ptx.ckpt.__main__ import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    small = Small()
    state = {**small.state, "mine": PerRank([1])}
    with AsyncCheckpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(20, state, meta={"tokens": 7, "pair": (1, 2)})
    return tmp_path / "root"


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = time.time() - 2 * 86400 - 5
    os.utime(root / "step-1" / "manifest.json", (old, old))
    assert main(["list", str(root)]) == 0
    head, one, two = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["step", "size", "age", "state", "keys"]
    assert one[0::5] == ["1", "ok"]
    assert one[3:] == ["2", "d", "ok", "4"]
    assert two[0] == "20"
    assert two[-2:] == ["ok", "4"]

    data_files(root, 20)[0].write_bytes(b"short")
    (root / "step-3").mkdir()
    assert main(["list", str(root)]) == 1
    output = capsys.readouterr().out
    assert "rank-00000.distcp, byte 5: 5 bytes, not" in output
    assert f"{root}/step-3/manifest.json, byte 0: No such file" in output
    assert main(["list", str(root / "step-1")]) == 0


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(root)]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == f"step 20 in {root}/step-20"
    assert "in 2 files, format 1" in lines[1]
    assert lines[2].endswith("saved by 1 ranks")
    assert lines[3] == 'meta {"tokens": 7, "pair": {"$": ["tuple", [1, 2]]}}'
    assert "model: 3 tensors, 96 values" in lines
    assert "  model.0.weight float32 (8, 8)" in lines
    assert "mine: 0 tensors, 0 values, one for each rank" in lines
    assert "  optimizer.state.0.weight.step float32 ()" in lines
    assert main(["show", str(root / "step-1")]) == 0
    assert capsys.readouterr().out.startswith(f"step 1 in {root}/step-1\n")


def test_verify_names_every_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    with AsyncCheckpointer(root) as checkpointer:
        save_filled(checkpointer, Small(size=1200), 1, 2)  # 17 MB
        writer = Path(f"/proc/{writer_pid(checkpointer)}/maps").read_text()
        assert "libtorch" not in writer
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().out == "2 steps, 33 MiB: whole\n"
    (file,) = data_files(root, 1)
    for offset in (7, 4 * 2**20 - 1, 9 * 2**20):
        flip(file, offset)
    (root / "step-2" / ".metadata").unlink()
    assert main(["verify", str(root)]) == 1
    head, *found = capsys.readouterr().out.splitlines()
    assert head.endswith("damaged")
    assert found == [
        f"step 1: {file}, byte 0: the checksum of {4 * 2**20} bytes doesn't match",
        f"step 1: {file}, byte {8 * 2**20}: the checksum of {4 * 2**20} bytes doesn't match",
        f"step 2: {root}/step-2/.metadata, byte 0: No such file or directory",
    ]
    assert main(["verify", str(root / "step-2")]) == 1


@pytest.mark.parametrize("command", ["verify", "list", "show"])
def test_nothing_there_is_an_error(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "step-3"):
        assert main([command, str(path)]) == 2
        assert "is no step-N folder, and holds none" in capsys.readouterr().err


def test_as_a_command_without_torch(root: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['ckpt', 'verify', sys.argv[1]]\n"
        "try: runpy.run_module('ptx.ckpt', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 steps, 0 MiB: whole\nFalse\n"
    flip(data_files(root, 1)[0], 3)
    command = [sys.executable, "-m", "ptx.ckpt", "verify", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "step 1: " in done.stdout
