"""Names and sealed files of a checkpoint folder; shared with the writer process, so without torch."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from typing import Any

import xxhash

FORMAT = 1  # of the manifest; a reader refuses a newer one
CHUNK_BYTES = 4 * 2**20  # each chunk of a data file has a checksum of its own
PIECE_BYTES = 256 * 2**10  # read at once: stays in a core's cache until it is hashed
MANIFEST = "manifest.json"

# A save is written to a hidden folder, which one rename turns into step-N. Only full matches count.
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
SAVING = re.compile(r"\.saving-(0|[1-9][0-9]*)-[0-9a-f]+")
REPLACED = re.compile(r"\.replaced-(0|[1-9][0-9]*)-[0-9a-f]+")  # a step-N that is saved again
TRASH = re.compile(r"\.trash-[0-9a-f]+")


class DamagedError(Exception):
    """A file that isn't what was written; ``offset`` in bytes."""

    def __init__(self, file: str, offset: int, reason: str) -> None:
        super().__init__(f"{file}, byte {offset}: {reason}")
        self.file, self.offset, self.reason = file, offset, reason


def data_file(rank: int) -> str:
    return f"rank-{rank:05d}.distcp"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def abort_file(rank: int) -> str:
    return f"abort-{rank:05d}"


def step_folders(root: str) -> dict[int, str]:
    """Where each step is that was committed, or looks so, by ascending step."""
    found: dict[int, str] = {}
    replaced: dict[int, str] = {}
    for name in os.listdir(root):
        if match := STEP.fullmatch(name):
            found[int(match[1])] = os.path.join(root, name)
        elif match := REPLACED.fullmatch(name):
            replaced[int(match[1])] = os.path.join(root, name)
    # Between the two renames that replace a step only this one is there.
    return dict(sorted({**replaced, **found}.items()))


def leftovers(root: str) -> list[str]:
    """What saves of processes that are gone have left; also what saves of this moment are at."""
    steps = step_folders(root).values()
    return [
        name
        for name in os.listdir(root)
        if SAVING.fullmatch(name)
        or TRASH.fullmatch(name)
        or (REPLACED.fullmatch(name) and os.path.join(root, name) not in steps)
    ]


def seal(body: bytes) -> bytes:
    """``body`` after a line with its size and checksum."""
    head = {
        "ptx_checkpoint": "sealed",
        "bytes": len(body),
        "xxh3_64": xxhash.xxh3_64_hexdigest(body),
    }
    return json.dumps(head).encode() + b"\n" + body


def unseal(file: str, raw: bytes) -> Any:
    """The JSON value in a sealed file; raises `DamagedError`."""
    line, _, body = raw.partition(b"\n")
    # Compared as text, not parsed: whatever differs is damage.
    if line + b"\n" + body != seal(body):
        raise DamagedError(file, 0, "its checksum doesn't match, or it isn't whole")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(file, len(line) + 1, f"it is no JSON: {error}") from None


def read_manifest(folder: str) -> tuple[bytes, Any]:
    """The raw manifest of a step and its value; raises `DamagedError`."""
    path = os.path.join(folder, MANIFEST)
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            raw = file.read()
    except OSError as error:
        raise DamagedError(path, 0, _reason(error)) from None
    return raw, unseal(path, raw)


def check_sizes(folder: str, manifest: Any) -> None:
    """Raise `DamagedError` for a file that is missing or has another size than the manifest says."""
    for entry in manifest["files"]:
        path = os.path.join(folder, entry["name"])
        try:
            about = os.stat(path)
        except OSError as error:
            raise DamagedError(path, 0, _reason(error)) from None
        size = about.st_size
        if not stat.S_ISREG(about.st_mode):
            raise DamagedError(path, 0, "it is no plain file")
        if size != entry["bytes"]:
            raise DamagedError(
                path, min(size, entry["bytes"]), f"{size} bytes, not {entry['bytes']}"
            )


def check_chunks(folder: str, entry: Any, chunks: list[int] | None = None) -> None:
    """Compare chunks of a data file (None: all) with their checksums; raises `DamagedError`."""
    path = os.path.join(folder, entry["name"])
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        fd = open_plain(path)
    except OSError as error:
        raise DamagedError(path, 0, _reason(error)) from None
    try:
        size = os.fstat(fd).st_size
        if size != entry["bytes"]:
            raise DamagedError(
                path, min(size, entry["bytes"]), f"{size} bytes, not {entry['bytes']}"
            )
        for chunk in range(len(entry["xxh3_64"])) if chunks is None else chunks:
            start = chunk * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, size)
            hasher = xxhash.xxh3_64()
            at = start
            while at < stop:
                try:
                    count = os.preadv(fd, [buffer[: stop - at]], at)
                except OSError as error:
                    raise DamagedError(path, at, _reason(error)) from None
                if not count:
                    raise DamagedError(path, at, "the file ends here")
                hasher.update(buffer[:count])
                at += count
            if hasher.hexdigest() != entry["xxh3_64"][chunk]:
                raise DamagedError(
                    path, start, f"the checksum of {stop - start} bytes doesn't match"
                )
    finally:
        os.close(fd)


def open_plain(path: str) -> int:
    """A descriptor to read from; raises OSError for what isn't a plain file, and may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file")
    return fd


def write_whole(path: str, data: bytes) -> None:
    """Write a new file so that it is there whole, or not at all; durable after `sync_folder`."""
    temporary = path + ".tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(root: str, name: str) -> None:
    """Delete a folder of ``root``. Renamed first: no one may commit it, or find half of it."""
    trash = os.path.join(root, f".trash-{os.urandom(6).hex()}")
    try:
        os.rename(os.path.join(root, name), trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
