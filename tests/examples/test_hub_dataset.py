"""A dataset repository, from a stand-in hub on this machine: which files, at which commit, and what is said."""

import errno
import json
import shutil

import huggingface_hub
import pytest

from examples.dataset_hub import DatasetHub, Process
from hub_dataset import HubFiles, choose, download, is_repository

SOON = 15.0  # seconds; the client alone would try some failures again for 24
REPO = "org/tiny"


def lines(texts):
    return "".join(json.dumps({"text": text, "url": ""}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / REPO
    (folder / "data").mkdir(parents=True)
    for shard in range(2):
        texts = [f"Training document {shard} {i}." for i in range(6)]
        (folder / f"data/train-{shard:05}-of-00002.jsonl").write_text(lines(texts))
    (folder / "data/validation-00000-of-00001.jsonl").write_text(lines(["Held out."] * 3))
    (folder / "data/test-00000-of-00001.jsonl").write_text(lines(["Never."]))
    (folder / "README.md").write_text("A train of thoughts.")
    (folder / "LICENSE.txt").write_text("free")
    hub = DatasetHub(folder.parents[1])
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub, home):
    with Process(hub, home) as started:
        yield started


@pytest.fixture(scope="module")
def offline(hub, home):
    with Process(hub, home, HF_HUB_OFFLINE="1") as started:
        yield started


@pytest.fixture
def another(hub, request):
    """A repository that is in nobody's cache."""
    name = f"org/{request.node.name}"
    shutil.copytree(hub.root / REPO, hub.root / name)
    return name


@pytest.fixture
def load(online, tmp_path):
    def call(repo=REPO, process=online, **options):
        return process.call("load", source=repo, cache=str(tmp_path), **options)

    return call


@pytest.fixture(autouse=True)
def _working(hub):
    hub.mode, hub.commit = "ok", "1" * 40
    hub.requests.clear()


def test_a_split_is_fetched_tokenised_and_cached(hub, load, another):
    answer = load(another)
    assert "value" in answer, answer
    got = answer["value"]
    assert got["documents"] == [11, 1]
    assert got["text"].startswith("Training document 0 0.<|endoftext|>Training document 0 1.")
    assert sorted(hub.files_sent()) == [f"train-0000{i}-of-00002.jsonl" for i in range(2)]
    assert got["said"][0] == f"downloading 2 files of {another}, commit 11111111"
    assert got["said"][1].startswith("tokenising 2 files, 0.")
    hub.requests.clear()
    again = load(another)["value"]
    assert again == got | {"said": []}  # neither is done again
    assert len(hub.requests) == 1


def test_options_reach_the_files(hub, load):
    got = load(valid_split="validation")["value"]
    assert got["documents"] == [12, 3]
    assert load(data_limit=7, hold_out=2)["value"]["documents"] == [3, 4]
    got = load(hub_files="data/train-00001*")["value"]
    assert "document 1 0" in got["text"]
    assert "document 0" not in got["text"]
    error = load(column="body")["error"]
    assert (
        "train-00000-of-00002.jsonl, line 1: no column 'body'; there are ['text', 'url']" in error
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repo": "org/absent"}, "org/absent is no file or folder here, and no dataset on the hub"),
        ({"data_revision": "v9"}, f"{REPO} has no revision 'v9'"),
        ({"split": "dev"}, f"{REPO} has no split 'dev'"),
        ({"hub_files": "*.csv"}, f"{REPO} has no file like '*.csv'"),
    ],
)
def test_what_is_not_there(load, options, said):
    answer = load(**options)
    assert said in answer["error"], answer
    assert answer["seconds"] < SOON


@pytest.mark.parametrize(
    ("mode", "said"), [("500", "answered 500"), ("hang", "doesn't answer"), ("gated", "is gated")]
)
def test_a_failing_hub_is_an_error_even_if_the_data_is_cached(hub, online, load, mode, said):
    assert "value" in load()
    online.call("timeout", seconds=1)
    hub.mode = mode
    for repo in (REPO, "org/other"):
        answer = load(repo)
        assert said in answer["error"], answer
        assert answer["seconds"] < SOON
    online.call("timeout", seconds=10)


def test_a_hub_that_is_gone(hub, load, another):
    assert "value" in load()
    hub.stop()
    try:
        for repo in (REPO, another):  # cached or not: nothing else is taken in silence
            answer = load(repo)
            assert "the hub doesn't answer" in answer["error"], answer
            assert "HF_HUB_OFFLINE=1" in answer["error"]
            assert answer["seconds"] < SOON
    finally:
        hub.start()


def test_a_hub_that_fails_after_its_first_answer(hub, load, another):
    hub.mode = "one answer"
    answer = load(another)
    assert answer["error"].startswith("ValueError: download: "), answer
    assert answer["seconds"] < SOON
    hub.mode = "ok"
    assert "value" in load(another)
    hub.commit, hub.mode = "2" * 40, "one answer"  # the client would hand out the older copy
    answer = load(another)
    assert "error" in answer, answer


def test_a_new_commit_is_other_data(hub, load, another):
    first = load(another)["value"]
    hub.commit = "2" * 40
    file = hub.root / another / "data/train-00000-of-00002.jsonl"
    file.write_text(lines([f"Changed {i}." for i in range(6)]))
    second = load(another)["value"]
    assert "Changed" in second["text"]
    assert second["digest"] != first["digest"]
    hub.commit = "1" * 40
    assert load(another, data_revision="1" * 40)["value"]["digest"] == first["digest"]


def test_offline_the_cache_is_what_there_is(hub, load, offline, home, another):
    online = load(another)["value"]
    hub.requests.clear()
    assert load(another, offline)["value"] == online | {"said": []}
    answer = load("org/other", offline)
    assert "org/other isn't in the cache of huggingface_hub, and HF_HUB_OFFLINE" in answer["error"]
    assert answer["seconds"] < SOON
    assert f"{another} at v9 isn't" in load(another, offline, data_revision="v9")["error"]
    # What was never fetched, and a part of what was, aren't taken for the whole.
    assert "isn't wholly in the cache" in load(another, offline, split="test")["error"]
    cached = home / "hub" / f"datasets--{another.replace('/', '--')}"
    next(cached.rglob("train-00001*")).unlink()
    assert "isn't wholly in the cache" in load(another, offline)["error"]
    assert hub.requests == []


def test_ranks_of_a_host_download_once_and_fail_together(hub, tmp_path):
    with Process(hub, tmp_path / "home") as first, Process(hub, tmp_path / "home") as second:

        def both(**options):
            for process_ in (first, second):
                process_.send("load", cache=str(tmp_path / "cache"), **options)
            return [process_.receive() for process_ in (first, second)]

        for rank, process_ in enumerate((first, second)):
            process_.send("join", file=str(tmp_path / "store"), rank=rank, world=2)
        assert all("value" in process_.receive() for process_ in (first, second))
        answers = both(source=REPO)
        assert all("value" in answer for answer in answers), answers
        got = [answer["value"] for answer in answers]
        assert got[0]["digest"] == got[1]["digest"]
        assert sorted(hub.files_sent()) == [f"train-0000{i}-of-00002.jsonl" for i in range(2)]
        said = [text for value in got for text in value["said"]]
        assert len(said) == 2, said  # one downloads, one tokenises
        assert (
            sum(path.startswith("/api/") and "/tree/" not in path for _, path in hub.requests) <= 2
        )
        hub.mode = "500"
        answers = both(source="org/other")
        assert all("answered 500" in answer["error"] for answer in answers), answers


def test_a_full_disk_is_not_taken_for_the_hub(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ValueError, match="disk of huggingface_hub's cache is full"):
        download(HubFiles("org/absent", None, "1" * 40, ("train.jsonl",)))


def test_which_files_are_a_splits():
    def chosen(*names, split="train", files=None):
        return choose(names, REPO, split=split, files=files)

    assert chosen("data/train-00000-of-00001.parquet", "data/test-0.parquet", "README.md") == [
        "data/train-00000-of-00001.parquet"
    ]
    assert chosen("train.jsonl", "valid.jsonl", split="valid") == ["valid.jsonl"]
    assert chosen("a/train/0.parquet", "a/train/1.parquet", "a/test/0.parquet", split="test") == [
        "a/test/0.parquet"
    ]
    # Without names of splits all is "train", and only that.
    assert chosen("b.parquet", "a.parquet", "training-notes.txt") == ["a.parquet", "b.parquet"]
    with pytest.raises(ValueError, match=r"no split 'test' .* it has a.parquet"):
        chosen("a.parquet", split="test")
    with pytest.raises(ValueError, match=r"several folders.*: de, en; say which files"):
        chosen("de/train.parquet", "en/train.parquet")
    assert chosen("de/train.parquet", "en/train.parquet", files="en/*") == ["en/train.parquet"]
    assert chosen("x/a.txt", "x/constraints.md") == ["x/a.txt", "x/constraints.md"]
    assert [is_repository(n) for n in ("org/name", "name", "a/b/c", "./a", "org/n.v-1_x")] == [
        True,
        False,
        False,
        False,
        True,
    ]
