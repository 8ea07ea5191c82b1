"""What a run trains on: the embedded corpus, one's own files, images, random tokens."""

import hashlib
import importlib.util
import lzma
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from tokenizers import Tokenizer

import baselines
import data
import text_data
from examples.idx_files import write_images
from harness import distributed
from images import PIXELS
from ptx.mesh import build_mesh, data_mesh

FOLDER = data.CORPUS.parent
MODULES = (
    *("batches", "data", "hub_dataset", "images", "packing", "sources"),
    *("text_data", "together", "token_cache", "tokenise"),
)
SENTENCE = "The state of the union is strong, {} times."


def write_corpus(path, texts):
    lines = "".join(f"{1900 + i}_someone\t{text}\n" for i, text in enumerate(texts))
    path.write_bytes(lzma.compress(lines.encode()))
    return path


@pytest.fixture
def folder(tmp_path):
    """24 text files of one sentence each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(24):
        (folder / f"{i:02}.txt").write_text(SENTENCE.format(i))
    return folder


def decoded(part, loaded):
    text = loaded.tokenizer.decode(part.tolist(), skip_special_tokens=False)
    return text.split("<|endoftext|>")


# --- the embedded corpus ---


@pytest.fixture(scope="module")
def documents():
    return list(text_data.read_corpus(data.CORPUS))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(data.TOKENIZER))


def test_files_are_the_ones_that_source_md_describes():
    rows = re.findall(
        r"^\| `?([^`|]+)`? \| ([\d,]+) \| `(\w{64})` \|$", (FOLDER / "SOURCE.md").read_text(), re.M
    )
    files = {name: (int(size.replace(",", "")), digest) for name, size, digest in rows}
    raw = lzma.decompress(data.CORPUS.read_bytes())
    contents = {p.name: p.read_bytes() for p in (data.CORPUS, data.TOKENIZER)}
    contents["the text inside"] = raw
    assert files == {n: (len(b), hashlib.sha256(b).hexdigest()) for n, b in contents.items()}
    assert sum(len(contents[p.name]) for p in (data.CORPUS, data.TOKENIZER)) < 2.7e6
    names = [line.split(b"\t")[0].decode() for line in raw.splitlines()]
    assert len(names) == 233
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"\d{4}(_[a-z]+)+", name) for name in names)


def test_corpus_is_split_cached_and_mapped(tmp_path):
    file = write_corpus(tmp_path / "c.xz", [SENTENCE.format(i) for i in range(24)])
    corpus = data.load_corpus(tmp_path / "cache", corpus=file)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16
    held_out = {5, 17}  # every twelfth, from the sixth on
    wanted = [SENTENCE.format(i) for i in range(24) if i not in held_out]
    assert decoded(corpus.train, corpus) == [*wanted, ""]
    assert decoded(corpus.valid, corpus) == [*(SENTENCE.format(i) for i in sorted(held_out)), ""]
    loaded = data.load_data("corpus", tmp_path / "cache", corpus=file)
    assert loaded.train.filename == corpus.train.filename
    assert (loaded.vocab_size, loaded.end_id) == (4096, 0)
    assert loaded.describe() == (
        f"{len(corpus.train):,} training tokens, {len(corpus.valid):,} held out,"
        " vocabulary of 4,096"
    )


@pytest.mark.slow
def test_tokenizer_rebuilds_to_the_same_bytes(documents):
    spec = importlib.util.spec_from_file_location("corpus_build", FOLDER / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.train_tokenizer(documents).encode() == data.TOKENIZER.read_bytes()


@pytest.mark.slow
def test_whole_corpus_comes_back_and_has_the_documented_numbers(documents, tokenizer, tmp_path):
    corpus = data.load_corpus(tmp_path)
    assert (len(corpus.train), len(corpus.valid)) == (2_279_886, 199_042)
    assert data.TrainBatches(corpus.train, 256, global_batch=1).epoch_size == 8905
    held_out = documents[5::12]
    assert decoded(corpus.train, corpus)[:-1] == [d for d in documents if d not in held_out]
    assert decoded(corpus.valid, corpus)[:-1] == held_out
    losses = baselines.baselines(corpus.train, corpus.valid, 4096)
    assert losses == pytest.approx(
        {"uniform": 8.3178, "unigram": 6.5873, "bigram": 4.5598}, abs=1e-4
    )


# --- text files ---


def test_tokens_are_made_once_per_content(folder, tmp_path, monkeypatch):
    cache, copy = tmp_path / "cache", tmp_path / "copy.txt"
    first = data.load_data(str(folder), cache)
    assert len(decoded(first.train, first)) == 23
    with monkeypatch.context() as patch:
        patch.setattr(text_data, "write_tokens", lambda *_: pytest.fail("tokenised again"))
        assert data.load_data(f"{folder}/*", cache).digest == first.digest
    vocabulary = tmp_path / "t.json"
    changed = Tokenizer.from_file(str(data.TOKENIZER))
    changed.add_tokens(["one more"])
    changed.save(str(vocabulary))
    digests = [first.digest]
    for options in (
        {"data_limit": 13},
        {"hold_out": 11},
        {"text_unit": "line"},
        {"column": "content"},
        {"tokenizer": vocabulary},
        {"end_of_text": "!"},
    ):
        digests.append(data.load_data(str(folder), cache, **options).digest)
    copy.write_text("changed")
    (folder / "00.txt").write_text(copy.read_text())
    digests.append(data.load_data(str(folder), cache).digest)
    assert len(set(digests)) == 8
    assert len(list(cache.glob("*.npy"))) == 16


def test_a_file_to_validate_on_is_held_out_whole(folder, tmp_path):
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("Something else.")
    loaded = data.load_data(str(folder), tmp_path / "cache", valid_data=str(held_out))
    assert len(decoded(loaded.train, loaded)) == 25
    assert decoded(loaded.valid, loaded) == ["Something else.", ""]
    held_out.write_text("And another.")
    other = data.load_data(str(folder), tmp_path / "cache", valid_data=str(held_out))
    assert decoded(other.valid, other) == ["And another.", ""]
    assert other.digest == loaded.digest  # what is trained on is the same: a resume may go on
    assert data.load_data(str(folder), tmp_path / "cache").digest != loaded.digest


@pytest.mark.parametrize(
    ("documents", "every", "held_out"), [(6, 12, 1), (2, 2, 1), (2, 3, 1), (5, 4, 1), (6, 4, 2)]
)
def test_every_so_many_documents_one_is_held_out(tmp_path, documents, every, held_out):
    file = tmp_path / "a.txt"
    file.write_text("word\n" * documents)
    loaded = data.load_data(str(file), tmp_path, text_unit="line", hold_out=every)
    ends = [int((part == loaded.end_id).sum()) for part in (loaded.train, loaded.valid)]
    assert ends == [documents - held_out, held_out]


def test_too_few_documents_are_refused_with_what_helps(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("word\n" * 5)
    with pytest.raises(
        ValueError, match=r"1 document can't be split: .* every 12, at least 6 are .*unit"
    ):
        data.load_data(str(file), tmp_path)
    with pytest.raises(ValueError, match="5 documents can't be split"):
        data.load_data(str(file), tmp_path, text_unit="line")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="1 documents to train on and 0 to validate on"):
        data.load_data(str(file), tmp_path, valid_data=str(tmp_path / "empty.txt"))
    assert not list(tmp_path.glob("*.npy"))
    loaded = data.load_data(str(file), tmp_path, text_unit="line", hold_out=2)
    with pytest.raises(ValueError, match="windows of seq_len can't fill global_batch 8"):
        data.TrainBatches(loaded.train, 16, global_batch=8)


def test_what_is_no_source_is_said(folder, tmp_path):
    assert data.kind_of(str(folder)) == data.kind_of("no/where/*.txt") == "files"
    assert data.kind_of("org/name") == "hub"
    for source in ("absent", "./absent.txt", "/absent/x", "a/b/c"):
        with pytest.raises(ValueError, match=f"{source!r} is no file, folder or glob here"):
            data.load_data(source, tmp_path)
    with pytest.raises(ValueError, match="say where MNIST's files are: mnist:FOLDER"):
        data.load_data("mnist", tmp_path)
    with pytest.raises(ValueError, match="hold_out=1 must be at least 2"):
        data.load_data("corpus", tmp_path, hold_out=1)
    with pytest.raises(ValueError, match="valid_data='x' is for a source of files"):
        data.load_data("random", tmp_path, valid_data="x")


# --- images, random tokens ---


def test_images_have_the_same_form(tmp_path):
    write_images(tmp_path, train=20, test=4, size=(8, 8))
    loaded = data.load_data(f"mnist:{tmp_path}", tmp_path / "cache")
    assert loaded.tokenizer is None
    assert loaded.vocab_size == PIXELS + 10 + 1
    assert len(loaded.train) == 20 * (8 * 8 + 2)
    tokens, labels = data.TrainBatches(loaded.train, 8 * 8 + 2, global_batch=4).batch(0)
    assert (tokens[:, -1] == loaded.end_id).all()  # a window is an image
    assert (tokens[:, 0] >= PIXELS).all()
    assert (labels[:, -2] == loaded.end_id).all()
    limited = data.load_data(f"mnist:{tmp_path}", tmp_path / "cache", data_limit=3)
    assert len(limited.train) == len(limited.valid) == 3 * 66
    assert limited.train.tolist() == loaded.train[: 3 * 66].tolist()
    assert limited.digest != loaded.digest


def test_random_tokens_are_a_function_of_seed_and_index(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_RANDOM", (5000, 100))
    loaded = data.load_data("random", tmp_path, random_vocab=100, seed=3)
    assert loaded.train.min() == 0
    assert loaded.train.max() == 99
    assert loaded.train[:100].tolist() != loaded.valid.tolist()
    assert np.array_equal(
        loaded.train, data.load_data("random", tmp_path, random_vocab=100, seed=3).train
    )
    monkeypatch.setattr(data, "_RANDOM", (6000, 100))  # more of them begin with the same
    more = data.load_data("random", tmp_path, random_vocab=100, seed=3)
    assert np.array_equal(more.train[:5000], loaded.train)
    other = data.load_data("random", tmp_path, random_vocab=100, seed=4)
    assert not np.array_equal(other.train, more.train)
    assert other.digest != more.digest
    wide = data.load_data("random", tmp_path, random_vocab=2**16 + 1)
    assert wide.train.dtype == np.uint32
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="random_vocab=1 must be at least 2"):
        data.load_data("random", tmp_path, random_vocab=1)


# --- on ranks ---


@distributed(world_size=4)
def test_D04_ranks_read_the_samples_of_one_process_without_telling_each_other(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(SENTENCE.format(i) + "\n" for i in range(60)))
    data._RANDOM = (5000, 100)  # this is a process of its own
    dp = data_mesh(build_mesh(device_type="cpu", tp=2))
    rank, size = dp.get_local_rank(), dp.size()
    for source in (str(file), "random"):
        loaded = data.load_data(source, tmp_path / "cache", text_unit="line")
        mine = data.TrainBatches(loaded.train, 16, 4, rank, size, digest=loaded.digest)
        one = data.TrainBatches(loaded.train, 16, 4)
        for (got, _), (want, _) in islice(zip(mine, one), 5):
            assert got.tolist() == want.chunk(size)[rank].tolist()
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2


@distributed(world_size=2)
def test_ranks_fail_together(tmp_path):
    rank = dist.get_rank()
    (tmp_path / "a.txt").write_text("One.\nTwo.\nThree.")
    where = tmp_path / ("cache" if rank == 0 else "full")
    if rank == 1:
        where.write_text("no folder")
    with pytest.raises((ValueError, OSError), match=r"File exists|rank 1 on .*File exists"):
        data.load_data(str(tmp_path / "a.txt"), where, text_unit="line", hold_out=2)
    # A rank that sees other files than the first.
    mine = tmp_path / f"{rank}.txt"
    mine.write_text(f"{rank}\n" * 9)
    with pytest.raises(ValueError, match=r"rank 1 on .* has other data than rank 0 on"):
        data.load_data(str(mine), tmp_path / "cache", text_unit="line")
    with pytest.raises(ValueError, match="'absent' is no file, folder or glob here"):
        data.load_data("absent", tmp_path / "cache")


def test_nothing_is_fetched_or_read_from_the_environment():
    files = [
        *(Path(data.__file__).with_name(f"{name}.py") for name in MODULES),
        Path(baselines.__file__),
        FOLDER / "build.py",
        FOLDER / "SOURCE.md",
    ]
    for file in files:
        text = file.read_text()
        assert not re.search(r"https?://|environ", text)
