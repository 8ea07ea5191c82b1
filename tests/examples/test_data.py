import hashlib
import importlib.util
import lzma
import math
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import baselines
import data
from harness import distributed
from ptx.mesh import build_mesh, data_mesh

FOLDER = data.CORPUS.parent


def stream(n_windows=10, seq_len=4, **options):
    """Training batches over tokens 0, 1, 2, ...: the first token of a sample says its window."""
    tokens = np.arange(n_windows * seq_len + 1, dtype=np.uint16)
    return data.TrainBatches(tokens, seq_len, **options)


def ids(batches, steps):
    """Window ids that a rank reads in its next steps."""
    return [
        [int(row[0]) // batches.seq_len for row in tokens] for tokens, _ in islice(batches, steps)
    ]


def flat(lists):
    return [item for items in lists for item in items]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def write_corpus(path, texts):
    lines = "".join(f"{1900 + i}_someone\t{text}\n" for i, text in enumerate(texts))
    path.write_bytes(lzma.compress(lines.encode()))
    return path


# --- the training stream ---


def test_samples_are_windows_with_shifted_labels():
    tokens, labels = stream(global_batch=4).batch(0)
    assert tokens.shape == labels.shape == (4, 4)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens + 1, labels)  # the corpus counts up, so the next token is one more
    assert (tokens[:, 0] % 4 == 0).all()


def test_an_epoch_has_each_window_once_and_leaves_out_only_a_short_tail():
    tokens = np.arange(5 * 4 + 1 + 3, dtype=np.uint16)  # 5 windows, 3 tokens over
    batches = data.TrainBatches(tokens, 4, global_batch=1)
    assert sorted(flat(ids(batches, 5))) == [0, 1, 2, 3, 4]


def test_batch_depends_only_on_seed_and_samples_consumed():
    a, b = stream(global_batch=4, seed=7), stream(global_batch=4, seed=7)
    forward = [a.batch(n) for n in range(0, 40, 4)]
    backward = [b.batch(n) for n in range(36, -1, -4)][::-1]
    assert all(same(x, y) for x, y in zip(forward, backward, strict=True))
    assert not same(forward[0], stream(global_batch=4, seed=8).batch(0))


def test_D01_D07_resume_at_any_step_equals_uninterrupted():
    whole = ids(stream(global_batch=4), 12)
    for stop in range(12):
        first = stream(global_batch=4)
        seen = ids(first, stop)
        second = stream(global_batch=4)
        second.load_state_dict(first.state_dict())
        assert seen + ids(second, 12 - stop) == whole
    # 5 samples, saved after 7 reads: the next one is the third of the second epoch.
    first = stream(n_windows=5, global_batch=1)
    ids(first, 7)
    second = stream(n_windows=5, global_batch=1)
    second.load_state_dict(first.state_dict())
    assert ids(second, 1) == ids(stream(n_windows=5, global_batch=1, consumed=5 + 2), 1)


def test_D07_state_saved_in_the_loop_counts_the_batch_in_hand():
    batches = stream(global_batch=4)
    for step, _ in zip(range(1, 4), batches):
        assert batches.state_dict()["consumed"] == 4 * step


def test_resume_with_other_ranks_and_another_global_batch_goes_on_at_the_next_sample():
    samples = flat(ids(stream(global_batch=1), 24))
    first = stream(global_batch=4)
    ids(first, 3)
    resumed = [stream(global_batch=6, dp_rank=r, dp_world=2) for r in range(2)]
    for batches in resumed:
        batches.load_state_dict(first.state_dict())
    steps = zip(*(ids(batches, 2) for batches in resumed), strict=True)
    assert flat(a + b for a, b in steps) == samples[12:]


def test_resume_of_another_stream_is_refused():
    state = stream(global_batch=4).state_dict()
    for other in (stream(global_batch=4, seed=1), stream(n_windows=11, global_batch=4)):
        with pytest.raises(ValueError, match="not the same samples"):
            other.load_state_dict(state)


@pytest.mark.parametrize("dp_world", [2, 4])
def test_ranks_together_read_the_batches_of_one_process(dp_world):
    one = stream(global_batch=4)
    ranks = [stream(global_batch=4, dp_rank=r, dp_world=dp_world) for r in range(dp_world)]
    for want, *parts in islice(zip(one, *ranks), 6):
        assert same(want, [torch.cat(x) for x in zip(*parts, strict=True)])


def test_D03_epochs_differ_and_resume_inside_the_third_is_identical():
    epochs = [flat(ids(stream(global_batch=5, consumed=10 * e), 2)) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = stream(global_batch=5)
    resumed.load_state_dict(stream(global_batch=5, consumed=25).state_dict())
    assert flat(ids(resumed, 1)) == epochs[2][5:]


def test_D09_a_batch_at_the_end_of_an_epoch_is_filled_from_the_next():
    batches = ids(stream(global_batch=4), 5)  # 10 windows: 4, 4, 2 + 2, 4, 4
    assert [len(batch) for batch in batches] == [4] * 5
    read = flat(batches)
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


@distributed(world_size=4)
def test_D04_ranks_of_a_tp_group_read_the_same_samples():
    for degrees, want in [
        ({"tp": 2}, [0, 0, 1, 1]),
        ({"cp": 2}, [0, 0, 1, 1]),
        ({"pp": 2}, [0, 1, 0, 1]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]),
    ]:
        dp = data_mesh(build_mesh(device_type="cpu", **degrees))
        mine = stream(global_batch=4, dp_rank=dp.get_local_rank(), dp_world=dp.size())
        read = [None] * 4
        dist.all_gather_object(read, (dp.get_local_rank(), dp.size(), ids(mine, 3)))
        assert [rank for rank, _, _ in read] == want
        assert {size for _, size, _ in read} == {len(set(want))}
        shares = dict.fromkeys(want)
        for rank, _, samples in read:
            assert shares[rank] in (None, samples)
            shares[rank] = samples
        steps = [flat(parts) for parts in zip(*(shares[r] for r in sorted(shares)), strict=True)]
        assert steps == ids(stream(global_batch=4), 3)


def test_batches_that_cannot_be_made_are_refused_with_every_reason():
    with pytest.raises(ValueError, match="global_batch 6 is no multiple of 4 data ranks"):
        stream(global_batch=6, dp_world=4)
    with pytest.raises(ValueError, match="10 windows can't fill global_batch 12"):
        stream(global_batch=12)
    with pytest.raises(ValueError, match=r"no multiple of 4 .* and 10 windows can't fill"):
        stream(global_batch=13, dp_world=4)
    with pytest.raises(ValueError, match="0 windows"):
        data.TrainBatches(np.zeros(4, np.uint16), 4, global_batch=1)
    with pytest.raises(ValueError, match="global_batch 3 is no multiple of 2 data ranks"):
        next(data.validation_batches(np.zeros(9, np.uint16), 4, 3, 0, 2))


# --- validation ---


def test_D05_five_windows_on_two_ranks_pad_with_ignored_labels():
    tokens = np.arange(5 * 4 + 1, dtype=np.uint16)
    ranks = [list(data.validation_batches(tokens, 4, 2, rank, 2)) for rank in range(2)]
    windows = [[int(t[0, 0]) // 4 for t, y in batches if (y >= 0).all()] for batches in ranks]
    assert windows == [[0, 2, 4], [1, 3]]
    assert len(ranks[1]) == 3
    assert (ranks[1][2][1] == data.IGNORE_INDEX).all()


@pytest.mark.parametrize("n_tokens", [2, 5, 16, 17, 18, 41])
@pytest.mark.parametrize("dp_world", [1, 2, 4])
def test_D05_every_label_counts_once_in_equally_many_equal_batches(n_tokens, dp_world):
    tokens = np.arange(n_tokens, dtype=np.uint16)
    ranks = [
        list(data.validation_batches(tokens, 4, 4, rank, dp_world)) for rank in range(dp_world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    kept = []
    for inputs, labels in flat(ranks):
        assert inputs.shape == labels.shape == (4 // dp_world, 4)
        keep = labels != data.IGNORE_INDEX
        assert torch.equal(inputs[keep] + 1, labels[keep])
        kept += labels[keep].tolist()
    assert sorted(kept) == list(range(1, n_tokens))


# --- corpus, tokenizer, cache ---


@pytest.fixture(scope="module")
def documents():
    return data.read_documents(data.CORPUS)


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


def test_every_twelfth_address_is_held_out(documents):
    train, valid = data.split(documents)
    assert len(train) == 214
    assert valid == documents[5::12]
    assert not set(train) & set(valid)
    with pytest.raises(ValueError, match="of 5 documents is none"):
        data.split(documents[:5])


def test_encoding_comes_back_unchanged(documents, tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    texts = [*documents[5::48], "naïve — “quotes” \n\t\x00 日本語 🎉"]
    tokens = data.tokenize(texts, tokenizer)
    ends = np.flatnonzero(tokens == tokenizer.token_to_id(data.END_OF_TEXT))
    assert len(ends) == len(texts)
    assert ends[-1] == len(tokens) - 1
    parts = [tokens[a + 1 : b] for a, b in pairwise([-1, *ends])]
    assert tokenizer.decode_batch([part.tolist() for part in parts]) == texts


def test_M09_documents_end_once_and_begin_without_what_a_post_processor_adds():
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert tokenizer.encode("a b").ids == [0, 2, 3, 1]
    assert data.tokenize(["a b", "b"], tokenizer, "</s>").tolist() == [2, 3, 1, 3, 1]
    with pytest.raises(ValueError, match="id of '<eos>' is None"):
        data.tokenize(["a b"], tokenizer, "<eos>")


def test_cache_is_written_once_per_content(tmp_path, monkeypatch):
    file = write_corpus(tmp_path / "c.xz", [f"The union is strong, {i} times." for i in range(6)])
    first = data.load_corpus(tmp_path / "cache", corpus=file)
    assert first.tokenizer.decode(first.valid.tolist()) == "The union is strong, 5 times."
    assert isinstance(first.train, np.memmap)
    assert first.train.dtype == np.uint16
    with monkeypatch.context() as patch:
        patch.setattr(data, "tokenize", lambda *_: pytest.fail("tokenised again"))
        again = data.load_corpus(tmp_path / "cache", corpus=file)
    assert np.array_equal(first.train, again.train)
    write_corpus(file, ["Other words."] * 6)
    other = data.load_corpus(tmp_path / "cache", corpus=file)
    assert not np.array_equal(first.train, other.train)
    vocabulary = tmp_path / "t.json"
    vocabulary.write_text(data.TOKENIZER.read_text() + "\n")
    data.load_corpus(tmp_path / "cache", corpus=file, tokenizer=vocabulary)
    assert len(list((tmp_path / "cache").iterdir())) == 6


def test_ranks_may_fill_the_cache_at_once(tmp_path):
    file = write_corpus(tmp_path / "c.xz", ["The state of the union. " * 50] * 24)
    together = Barrier(8)

    def rank(_):
        together.wait()
        corpus = data.load_corpus(tmp_path / "cache", corpus=file)
        return corpus.train.tolist(), corpus.valid.tolist()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(rank, range(8)))
    assert all(result == results[0] for result in results)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("good_writes", [0, 1])  # the training part is written first
def test_a_write_that_fails_is_made_good_by_the_next_load(tmp_path, monkeypatch, good_writes):
    file = write_corpus(tmp_path / "c.xz", ["word"] * 6)
    save, left = np.save, [good_writes]

    def fails(target, tokens):
        if left[0]:
            left[0] -= 1
            save(target, tokens)
            return
        target.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fails)
        with pytest.raises(OSError, match="disk full"):
            data.load_corpus(tmp_path / "cache", corpus=file)
    assert len(list((tmp_path / "cache").iterdir())) == good_writes
    corpus = data.load_corpus(tmp_path / "cache", corpus=file)
    assert len(corpus.train) == 5 * len(corpus.valid) > 0


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
    texts = tokenizer.decode(corpus.train.tolist(), skip_special_tokens=False)
    assert texts.split(data.END_OF_TEXT)[:-1] == data.split(documents)[0]
    losses = baselines.baselines(corpus.train, corpus.valid, 4096)
    assert losses == pytest.approx(
        {"uniform": 8.3178, "unigram": 6.5873, "bigram": 4.5598}, abs=1e-4
    )


# --- baselines ---


def test_baselines_by_hand():
    train = np.array([0, 1, 0, 1, 0, 2], np.uint16)
    valid = np.array([0, 1, 2, 0], np.uint16)
    # Counts 3, 2, 1 with add-one: 4/9, 3/9, 2/9. Pairs 01, 10 twice, 02 once: D = 1 / (1 + 2 * 2).
    known = (2 - 0.2) / 3 + 0.2 * 2 / 3 * (3 / 9)  # 1 after 0, which two tokens follow
    unseen = 0.2 * 1 / 2 * (2 / 9)  # 2 after 1
    new_context = 4 / 9  # nothing ever followed 2
    got = baselines.baselines(train, valid, 3)
    assert got["uniform"] == pytest.approx(math.log(3))
    assert got["unigram"] == pytest.approx(-math.log(3 / 9 * 2 / 9 * 4 / 9) / 3)
    assert got["bigram"] == pytest.approx(-math.log(known * unseen * new_context) / 3)


@pytest.mark.parametrize("train", [[0, 1, 0, 1, 0, 2, 2, 4], [1, 1, 1, 1], [0, 1, 0, 1, 0]])
def test_baselines_are_distributions(train):
    for kind in ("unigram", "bigram"):
        for context in range(5):
            pairs = [np.array([context, target], np.uint16) for target in range(5)]
            losses = [baselines.baselines(np.array(train, np.uint16), p, 5)[kind] for p in pairs]
            assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1.0)


def test_baselines_average_over_the_labels_of_validation_batches():
    rng = np.random.default_rng(0)
    train, valid = (rng.integers(0, 9, n).astype(np.uint16) for n in (200, 43))
    inputs, labels = zip(*data.validation_batches(valid, 8, 4, 0, 1), strict=True)
    keep = torch.cat(labels) != data.IGNORE_INDEX
    pairs = zip(torch.cat(inputs)[keep].tolist(), torch.cat(labels)[keep].tolist(), strict=True)
    each = [baselines.baselines(train, np.array(pair, np.uint16), 9)["bigram"] for pair in pairs]
    assert len(each) == 42
    assert baselines.baselines(train, valid, 9)["bigram"] == pytest.approx(sum(each) / 42)


def test_nothing_is_fetched_or_read_from_the_environment():
    files = [
        Path(data.__file__),
        Path(baselines.__file__),
        FOLDER / "build.py",
        FOLDER / "SOURCE.md",
    ]
    for file in files:
        text = file.read_text()
        assert not re.search(r"https?://|environ", text)
