"""``python -m ptx.ckpt verify|list|show PATH``: look at checkpoints from a shell, without torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._store import Store
from ptx.ckpt._verify import find_steps, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0; 1 for damage; 2 if there is nothing to look at."""
    parser = argparse.ArgumentParser("python -m ptx.ckpt", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in {
        "verify": "read all bytes and compare them with their checksums; exit code 1 for damage",
        "list": "one line for each step: size, age, whether all files are there, number of keys",
        "show": "what a step holds (of a root: the newest one): keys, tensors, meta",
    }.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("path", help="a root, a step's folder in it, or the URL of either")
    args = parser.parse_args(arguments)
    run = {"verify": _verify, "list": _list, "show": _show}[args.command]
    try:
        return run(args.path)
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _verify(path: str) -> int:
    report = verify(path)
    print(report)
    return 0 if report.ok else 1


def _list(path: str) -> int:
    store, steps = _steps(path)
    print(f"{'step':>12}  {'size':>10}  {'age':>8}  {'state':<8}  keys")
    ok = True
    for step, folder in reversed(steps):
        manifest, problem = _manifest(store, folder)
        ok = ok and not problem
        size = age = keys = "?"
        if manifest is not None:
            size = _size(sum(entry["bytes"] for entry in manifest["files"]))
            keys = str(len(manifest["keys"]))
            age = _age(store.modified(folder))
        state = "damaged" if problem else "ok"
        print(f"{step:>12}  {size:>10}  {age:>8}  {state:<8}  {keys}")
        if problem:
            print(f"{'':>12}  {problem}")
    return 0 if ok else 1


def _show(path: str) -> int:
    store, steps = _steps(path)
    for step, folder in steps:
        manifest, problem = _manifest(store, folder)
        if manifest is None:
            print(f"step {step}: {problem}")
            continue
        _print_step(store, folder, manifest)
        if problem:
            print(f"damaged: {problem}")
        return 1 if problem else 0
    return 1


def _print_step(store: Store, folder: str, manifest: Any) -> None:
    total = sum(entry["bytes"] for entry in manifest["files"])
    print(f"step {manifest['step']} in {folder}")
    print(f"size {_size(total)} in {len(manifest['files'])} files, format {manifest['format']}")
    print(f"age {_age(store.modified(folder))}, saved by {manifest['world_size']} ranks")
    print(f"meta {json.dumps(manifest['meta'])}")
    own = set(manifest["per_rank"][0])
    for key in manifest["keys"]:
        # Of a key that differs by rank, names begin with the rank: all ranks' are shown.
        tensors = {
            name: (dtype, shape)
            for name, (dtype, shape, _) in manifest["tensors"].items()
            if name.startswith(f"{key}.")
        }
        values = sum(math.prod(shape) for _, shape in tensors.values())
        note = ", one for each rank" if key in own else ""
        print(f"{_printable(key)}: {len(tensors)} tensors, {values} values{note}")
        for name, (dtype, shape) in tensors.items():
            print(f"  {_printable(name)} {_printable(dtype)} {tuple(shape)}")


def _steps(path: str) -> tuple[Store, list[tuple[int, str]]]:
    store, steps = find_steps(path)
    if not steps:
        raise ValueError(f"{path} is no step-N folder, and holds none")
    return store, steps


def _manifest(store: Store, folder: str) -> tuple[Any, str]:
    """A step's manifest, if it can be read, and what is wrong with the step at first sight."""
    try:
        _, manifest = store.manifest(folder)
    except _disk.DamagedError as error:
        return None, str(error)
    try:
        store.check_sizes(folder, manifest)
    except _disk.DamagedError as error:
        return manifest, str(error)
    return manifest, ""


def _printable(name: str) -> str:
    """A stranger's name, without what a terminal would obey."""
    return name if name.isprintable() else ascii(name)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(since: float | None) -> str:
    if since is None:
        return "?"
    seconds = max(0, int(time.time() - since))
    for unit, length in {"d": 86400, "h": 3600, "min": 60}.items():
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


if __name__ == "__main__":
    sys.exit(main())
