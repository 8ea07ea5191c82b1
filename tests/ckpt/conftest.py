import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Neither a process nor a buffer of a test outlives it."""
    yield
    assert not slots_of(os.getpid())
    assert not writers_under(os.getpid())


def slots_of(pid: int) -> list[str]:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:
            continue
    return [link for link in links if "ptx-" in link]


def writers_under(parent: int) -> list[int]:
    return [pid for pid, of, _ in _writers() if of == parent]


def writers_on(root: str) -> list[int]:
    """Process ids of the writers of a root, whoever started them."""
    return [pid for pid, _, command in _writers() if f'"root": "{root}"' in command]


def _writers() -> list[tuple[int, int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if "_writer.py" not in command:
                    continue
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                found.append((int(folder.name), int(stat[1]), command))
    return found
