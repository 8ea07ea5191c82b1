"""Documents from files: text, JSON lines or parquet, one file, a folder or a glob."""

from __future__ import annotations

import bz2
import glob
import gzip
import importlib
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

TextUnit = Literal["file", "paragraph", "line"]
Format = Literal["text", "jsonl", "parquet"]

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_ROWS = 1024  # of a parquet file in memory at once


def find_files(source: str) -> list[Path]:
    """The files that ``source`` names, in the order of their names.

    Args:
        source: A file of any name; a folder, whose files of a known ending are taken, those in
            folders inside it too, but nothing hidden; or a glob, ``**`` included.

    Raises:
        ValueError: There is none, or they are of several formats.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if known_format(file.name) and file.is_file())
        found = [file for file in inside if not _hidden(file.relative_to(path))]
    elif path.is_file():
        found = [path]
    else:
        names = glob.glob(str(path), recursive=True)
        found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        endings = ", ".join(_FORMATS)
        raise ValueError(
            f"find_files: {source} is no file, no folder with files ({endings}, or one of them"
            f" with {', '.join(_OPEN)}), and no glob that matches one"
        )
    by_format: dict[str, list[str]] = {}
    for file in sorted(found):
        by_format.setdefault(known_format(file.name) or "text", []).append(file.name)
    if len(by_format) > 1:
        kinds = "; ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in by_format.items())
        raise ValueError(f"find_files: {source} has files of several formats: {kinds}; use a glob")
    return sorted(found)


def known_format(name: str) -> Format | None:
    """The format that a file's name says, whether compressed or not."""
    path = Path(name)
    ending = Path(path.stem).suffix if path.suffix in _OPEN else path.suffix
    return _FORMATS.get(ending.lower())


def read_documents(
    files: Iterable[Path], *, column: str = "text", unit: TextUnit = "file"
) -> Iterator[str]:
    """Reads the documents of ``files`` one after the other; those without any text are left out.

    Args:
        files: Of `find_files`; anything but JSON lines and parquet is UTF-8 text.
        column: Of JSON lines and parquet: where the text is.
        unit: What a document is in text: a whole file, a paragraph (up to the next empty line), or
            a line.

    Raises:
        ValueError: A file isn't what its ending says, has no such column, or pyarrow is missing.

    Memory: one file for "file" and "paragraph", else some rows.
    """
    for file in files:
        kind = known_format(file.name) or "text"
        try:
            if kind == "parquet":
                documents = _parquet(file, column)
            elif kind == "jsonl":
                documents = _json_lines(file, column)
            else:
                documents = _text(file, unit)
            yield from (document for document in documents if document.strip())
        except (UnicodeDecodeError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"read_documents: {file} can't be read as {kind}: {error}") from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text(file: Path, unit: TextUnit) -> Iterator[str]:
    with _opened(file) as lines:
        if unit == "line":
            yield from (line.rstrip("\n") for line in lines)
        elif unit == "file":
            yield lines.read()
        elif unit == "paragraph":
            yield from re.split(r"\n[^\S\n]*\n\s*", lines.read().strip())
        else:
            raise ValueError(f"read_documents: unit={unit!r}; it is 'file', 'paragraph' or 'line'")


def _json_lines(file: Path, column: str) -> Iterator[str]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"read_documents: {file}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{where}: not one JSON value ({error}); write one object a line"
                ) from error
            if not isinstance(record, dict) or column not in record:
                there = list(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(f"{where}: no column {column!r}; there are {there}")
            yield _checked(record[column], where, column)


def _parquet(file: Path, column: str) -> Iterator[str]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ValueError(
            f"read_documents: {file} needs pyarrow: pip install 'ptx-parallel[hub]'"
        ) from error
    where = f"read_documents: {file}"
    try:
        with parquet.ParquetFile(file) as table:
            if column not in (names := table.schema_arrow.names):
                raise ValueError(f"{where}: no column {column!r}; there are {names}")
            for rows in table.iter_batches(batch_size=_ROWS, columns=[column]):
                for value in rows.column(0).to_pylist():
                    yield _checked(value, where, column)
    except arrow.ArrowException as error:
        raise ValueError(f"{where} can't be read as parquet: {error}") from error


def _checked(value: object, where: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    return value


def _opened(file: Path) -> IO[str]:
    stream: IO[str] = _OPEN.get(file.suffix, open)(file, "rt", encoding="utf-8-sig")
    return stream
