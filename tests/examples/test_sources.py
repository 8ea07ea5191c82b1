"""Documents out of files of every kind, and what is said of files that have none."""

import bz2
import gzip
import json
import lzma
import sys

import pytest

from sources import find_files, read_documents

TEXTS = ["One.\nTwo.", "Zwei: naïve — 日本語 🎉", "Three\n\n\nparagraphs\n \nhere"]


def documents(source, **options):
    return list(read_documents(find_files(str(source)), **options))


def write_json(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: t}) + "\n" for i, t in enumerate(texts)))
    return path


def write_parquet(path, texts, column="text", **options):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"id": list(range(len(texts))), column: texts})
    __import__("pyarrow.parquet").parquet.write_table(table, path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    return tmp_path


def test_a_text_file_is_a_document_and_a_folder_is_many(folder):
    assert documents(folder / "1.txt") == [TEXTS[1]]
    assert documents(folder) == TEXTS
    assert documents(f"{folder}/[12].txt") == TEXTS[1:]
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "x.txt").write_text("inner")
    (folder / "picture.png").write_bytes(b"\xff")
    (folder / ".cache").mkdir()
    (folder / ".cache/left.txt").write_text("hidden")
    assert documents(folder) == [*TEXTS, "inner"]
    assert documents(f"{folder}/**/*.txt") == [*TEXTS, "inner"]


def test_paragraphs_and_lines_are_documents_if_asked(folder):
    assert documents(folder / "2.txt", unit="paragraph") == ["Three", "paragraphs", "here"]
    assert documents(folder / "2.txt", unit="line") == ["Three", "paragraphs", "here"]
    assert documents(folder / "0.txt", unit="paragraph") == [TEXTS[0]]
    assert documents(folder / "0.txt", unit="line") == ["One.", "Two."]
    with pytest.raises(ValueError, match="unit='word'; it is"):
        documents(folder, unit="word")


def test_line_ends_of_windows_and_a_byte_order_mark_leave_no_trace(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo\r\n".encode())
    assert documents(tmp_path) == ["one\n\ntwo\n"]
    assert documents(tmp_path, unit="paragraph") == ["one", "two"]


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_compressed_files_read_like_others(tmp_path, ending, compress):
    (tmp_path / f"a.txt{ending}").write_bytes(compress(TEXTS[1].encode()))
    assert documents(tmp_path) == [TEXTS[1]]
    lines = write_json(tmp_path / "b.jsonl", TEXTS)
    packed = tmp_path / f"b.jsonl{ending}"
    packed.write_bytes(compress(lines.read_bytes()))
    assert documents(packed) == TEXTS
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"b.jsonl{ending} can't be read as jsonl"):
        documents(packed)


def test_json_lines(tmp_path):
    file = write_json(tmp_path / "a.jsonl", [*TEXTS, "", " \n", None], column="content")
    assert documents(file, column="content") == TEXTS  # those without text are left out
    with pytest.raises(
        ValueError, match=r"a.jsonl, line 1: no column 'text'; .*\['id', 'content'\]"
    ):
        documents(file)
    with pytest.raises(ValueError, match="column 'id' holds int, not text"):
        documents(file, column="id")
    file.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(ValueError, match="line 3: not one JSON value"):
        documents(file)
    file.write_text('["a"]\n')
    with pytest.raises(ValueError, match="no column 'text'; there are list"):
        documents(file)


def test_parquet(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", [*TEXTS, None, ""] * 700, row_group_size=100)
    assert documents(file) == TEXTS * 700
    with pytest.raises(ValueError, match=r"a.parquet: no column 'content'; .*\['id', 'text'\]"):
        documents(file, column="content")
    with pytest.raises(ValueError, match="column 'id' holds int, not text"):
        documents(file, column="id")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a.parquet can't be read as parquet"):
        documents(file)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"a.parquet needs pyarrow: pip install .*\[hub\]"):
        documents(tmp_path)


def test_what_cannot_be_read_is_said(folder):
    with pytest.raises(ValueError, match=r"absent.txt is no file, no folder"):
        find_files(str(folder / "absent.txt"))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is no file, no folder with files"):
        find_files(str(folder / "empty"))
    write_json(folder / "z.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"several formats: 3 text \(0.txt\); 1 jsonl \(z.jsonl\)"):
        find_files(str(folder))
    (folder / "latin.text").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.text can't be read as text: 'utf-8'"):
        documents(folder / "latin.text")
