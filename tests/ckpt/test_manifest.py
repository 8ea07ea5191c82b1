"""A manifest that no save wrote: its step counts as damaged, on all ranks, and nothing is written."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.small import Small, save_filled
from ptx.ckpt import AsyncCheckpointer, _disk, verify
from ptx.ckpt.__main__ import main
from ptx.ckpt._manifest import check_manifest

Change = Callable[[Any], object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path) as c:
        save_filled(c, Small(), 1, 2)
    return tmp_path


def rewrite(root: Path, change: Change, step: int = 2) -> None:
    """Change a manifest, with a right checksum."""
    path = root / f"step-{step}" / _disk.MANIFEST
    manifest = json.loads(path.read_bytes().partition(b"\n")[2])
    change(manifest)
    path.write_bytes(_disk.seal(json.dumps(manifest).encode()))


def weight(manifest: Any) -> Any:
    return manifest["tensors"]["model.0.weight"]


def moments(manifest: Any) -> Any:
    return manifest["values"]["optimizer"]["tree"]["state"]["0.weight"]


def nested(manifest: Any) -> None:
    tree: Any = 1
    for _ in range(900):
        tree = [tree]
    manifest["meta"] = tree


CHANGES: dict[str, tuple[Change, str]] = {
    "a file elsewhere": (
        lambda m: m["files"][0].update(name="../../secret"),
        "no file of a checkpoint",
    ),
    "a file twice": (lambda m: m["files"].append(m["files"][0]), "there twice"),
    "a huge file": (lambda m: m["files"][0].update(bytes=2**70), "bytes"),
    "too few checksums": (lambda m: m["files"][0].update(xxh3_64=[]), "no checksum for each"),
    "another rank": (lambda m: weight(m)[2][0].__setitem__(0, 7), "in the file of no rank"),
    "a negative offset": (lambda m: weight(m)[2][0].__setitem__(1, -64), "is at byte -64"),
    "past the end": (
        lambda m: weight(m)[2][0].__setitem__(1, m["files"][0]["bytes"] // 64 * 64),
        "doesn't hold all of its tensors",
    ),
    "between two values": (lambda m: weight(m)[2][0].__setitem__(1, 1), "is at byte 1"),
    "half of the values": (lambda m: weight(m)[2][0].__setitem__(3, [4, 8]), "has 32 of its 64"),
    "overlapping boxes": (
        lambda m: weight(m).__setitem__(2, [[0, 64, [0, 0], [4, 8]], [0, 64, [2, 0], [4, 8]]]),
        "some of its values twice",
    ),
    "a shape of text": (lambda m: weight(m).__setitem__(1, ["8", 8]), "the shape of"),
    "no tensor in the values": (lambda m: moments(m).update(exp_avg="x"), "don't match"),
    "no such tensor": (lambda m: moments(m).update(more={"$": ["tensor"]}), "don't match"),
    "an unknown kind": (lambda m: m.update(meta={"$": ["exec", "1"]}), "can't be read"),
    "an array of objects": (
        lambda m: m.update(meta={"$": ["numpy", "|O", [1], "AAAAAAAAAAA="]}),
        "can't be read",
    ),
    "unhashable members": (lambda m: m.update(meta={"$": ["set", [[1]]]}), "can't be read"),
    "nested without end": (nested, "can't be read"),
    "another step": (lambda m: m.update(step=1), "it is that of step 1, not 2"),
    "no keys": (lambda m: m.pop("keys"), "KeyError: 'keys'"),
    "keys that aren't there": (lambda m: m["keys"].append("more"), "aren't those it holds"),
    "no list of files": (lambda m: m.update(files=1), "its files are no list"),
    "no dict": (lambda m: m.update(values=[]), "aren't those it holds"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_save_wrote_is_damage(name: str, root: Path) -> None:
    change, message = CHANGES[name]
    rewrite(root, change)
    small = Small()
    small.fill(5)
    with AsyncCheckpointer(root) as c:
        with pytest.raises(RuntimeError, match=r"manifest\.json, byte 0: ") as caught:
            c.load(small.state, step=2)
        assert message in str(caught.value)
        assert small.values() == {5.0}
        assert c.load(small.state) == 1  # falls back
    assert small.values() == {1.0}


def test_nothing_else_happens_to_random_manifests(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "step-2" / _disk.MANIFEST
    manifest = json.loads(path.read_bytes().partition(b"\n")[2])
    rng, places = random.Random(0), list(_places(manifest, ()))
    odd = [None, -1, 0, 2**70, "x", [], {}, {"$": []}, {"$": ["tensor"]}, True, 1.5, [-1]]
    found = 0
    for _ in range(500):
        changed = copy.deepcopy(manifest)
        *outer, last = rng.choice(places)
        inside = changed
        for key in outer:
            inside = inside[key]
        inside[last] = rng.choice(odd)
        try:
            check_manifest("manifest.json", changed, 2)
        except _disk.DamagedError:
            found += 1
            continue
        path.write_bytes(_disk.seal(json.dumps(changed).encode()))
        for command in ("list", "show", "verify"):
            main([command, str(root)])
    assert found > 100
    capsys.readouterr()


def _places(value: Any, at: tuple[Any, ...]) -> Any:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*at, key)
            yield from _places(value[key], (*at, key))


def test_a_copied_step_is_not_another_one(root: Path) -> None:
    shutil.copytree(root / "step-1", root / "step-9")
    small = Small()
    with AsyncCheckpointer(root) as c:
        with pytest.raises(RuntimeError, match="it is that of step 1, not 9"):
            c.load(small.state, step=9)
        assert c.latest() == 2
        assert c.load(small.state) == 2
    assert not verify(root).ok


@pytest.mark.parametrize("name", [_disk.MANIFEST, _disk.data_file(0)])
def test_a_pipe_or_device_in_place_of_a_file_is_not_waited_for(name: str, root: Path) -> None:
    small = Small()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (root / "step-2" / name).unlink()
        make(root / "step-2" / name)
        with AsyncCheckpointer(root) as c:
            assert c.load(small.state) == 1
            assert c.latest() == 1
        assert "no plain file" in str(verify(root))


def test_names_with_terminal_codes_are_shown_escaped(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(root, lambda m: m["tensors"].update({"model.\x1b[2J": ["float32", [0], []]}))
    main(["show", str(root)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_root_may_have_the_name_of_a_step(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path / "step-5") as c:
        save_filled(c, Small(), 3)
    assert verify(tmp_path / "step-5").steps == (3,)
