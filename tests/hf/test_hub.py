"""Repositories of the hub, from a stand-in on this machine: what is fetched, and what is said."""

import shutil

import pytest
from tokenizers import Tokenizer, models

from hf.folders import change_config, write
from hf.hub import Hub, Process

SOON = 15.0  # seconds; the client alone would try some failures again for 24
REPO = "org/tiny"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    folder = write(root / "org/tiny", "llama2")
    Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    change_config(folder, bos_token_id=0)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "original").mkdir()
    (folder / "original/consolidated.safetensors").write_bytes(b"x" * 1000)
    (folder / "consolidated.safetensors").write_bytes(b"x" * 1000)
    (folder / "README.md").write_text("tiny")
    hub = Hub(root)
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


@pytest.fixture(autouse=True)
def _working(hub):
    hub.mode, hub.commit = "ok", "1" * 40
    hub.requests.clear()


def test_weights_configuration_and_tokenizer_come_and_nothing_else(hub, online):
    answer = online.call("load", repo=REPO)
    assert "value" in answer, answer
    weights = sorted(f.name for f in (hub.root / REPO).glob("model-*.safetensors"))
    wanted = [*weights, "config.json", "generation_config.json", "tokenizer.json"]
    assert sorted(hub.files_sent()) == sorted([*wanted, "model.safetensors.index.json"])
    # A local folder gives the same weights.
    assert online.call("load", repo=str(hub.root / REPO))["value"] == answer["value"]
    assert online.call("tokenize", repo=REPO, text="a")["value"] == [0, 1]


def test_what_is_cached_is_asked_for_but_not_fetched_again(hub, online):
    folder = online.call("folder", path_or_repo=REPO)["value"]
    hub.requests.clear()
    assert online.call("folder", path_or_repo=REPO)["value"] == folder
    assert folder.endswith("/" + "1" * 40)
    assert hub.files_sent() == []
    assert len(hub.requests) <= 3
    assert online.call("folder", path_or_repo=REPO, revision="1" * 40)["value"] == folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path_or_repo": "org/absent"}, "org/absent is no folder here and no repository on the"),
        ({"path_or_repo": REPO, "revision": "v9"}, f"{REPO} has no revision 'v9'"),
        ({"path_or_repo": "./absent"}, "'./absent' doesn't exist, and is no repository"),
        ({"path_or_repo": "a/b/c"}, "'a/b/c' doesn't exist, and is no repository 'org/name'"),
    ],
)
def test_what_is_not_there(online, arguments, said):
    answer = online.call("folder", **arguments)
    assert answer["error"].startswith(f"ValueError: hf_folder: {said}"), answer
    assert answer["seconds"] < SOON


def test_gated_repositories(hub, online):
    hub.mode = "gated"
    answer = online.call("folder", path_or_repo=REPO)
    assert f"{REPO} is gated; ask for access" in answer["error"]
    assert answer["seconds"] < SOON


@pytest.mark.parametrize(("mode", "said"), [("500", "answered 500"), ("hang", "doesn't answer")])
def test_a_failing_hub_is_an_error_even_if_the_model_is_cached(hub, online, mode, said):
    assert "value" in online.call("folder", path_or_repo=REPO)
    online.call("timeout", seconds=1)
    hub.mode = mode
    for repo in (REPO, "org/other"):
        answer = online.call("folder", path_or_repo=repo)
        assert said in answer["error"], answer
        assert answer["seconds"] < SOON
    online.call("timeout", seconds=10)


@pytest.mark.slow  # the client's own retries
def test_a_download_that_breaks_off(hub, online, another):
    hub.mode = "broken"
    answer = online.call("folder", path_or_repo=another)
    assert "could not be downloaded" in answer["error"], answer
    assert answer["seconds"] < SOON
    hub.mode = "ok"  # and it goes on
    assert "value" in online.call("load", repo=another)


def test_a_hub_that_is_gone(hub, online, another):
    assert "value" in online.call("folder", path_or_repo=REPO)
    hub.stop()
    try:
        for repo in (REPO, another):  # cached or not: an older copy isn't taken in silence
            answer = online.call("folder", path_or_repo=repo)
            assert "the hub doesn't answer" in answer["error"], answer
            assert "HF_HUB_OFFLINE=1" in answer["error"]
            assert answer["seconds"] < SOON
    finally:
        hub.start()


def test_a_new_commit_is_fetched(hub, online, another):
    assert online.call("folder", path_or_repo=another)["value"].endswith("1" * 40)
    hub.commit = "2" * 40
    assert online.call("folder", path_or_repo=another)["value"].endswith("2" * 40)
    asked = online.call("folder", path_or_repo=another, revision="2" * 40)
    assert asked["value"].endswith("2" * 40)


def test_a_hub_that_fails_after_naming_a_new_commit(hub, online, another):
    """The client would hand out the older copy."""
    assert "value" in online.call("folder", path_or_repo=another)
    hub.commit, hub.mode = "2" * 40, "one answer"
    answer = online.call("folder", path_or_repo=another)
    assert f"{another} is at commit {'2' * 40} on the hub" in answer["error"], answer


def test_offline_the_cache_is_what_there_is(hub, online, offline, home, another):
    value = online.call("load", repo=REPO)["value"]
    assert "value" in online.call("folder", path_or_repo=another)
    hub.requests.clear()
    assert offline.call("load", repo=REPO)["value"] == value
    answer = offline.call("folder", path_or_repo="org/other")
    assert "org/other isn't, or not wholly, in the cache" in answer["error"]
    assert answer["seconds"] < SOON
    answer = offline.call("folder", path_or_repo=REPO, revision="2" * 40)
    assert f"{REPO} at {'2' * 40} isn't" in answer["error"]
    # A part of it isn't taken for the whole.
    cached = home / "hub" / f"models--{another.replace('/', '--')}"
    next(cached.rglob("model-00002*")).unlink()
    answer = offline.call("load", repo=another)
    assert "model-00002" in answer["error"] or "not wholly" in answer["error"], answer
    assert hub.requests == []


def test_one_rank_of_a_host_downloads(hub, tmp_path):
    with Process(hub, tmp_path) as first, Process(hub, tmp_path) as second:
        ranks = [first, second]

        def both(name, **arguments):
            for process_ in ranks:
                process_.send(name, **arguments)
            return [process_.receive() for process_ in ranks]

        for rank, process_ in enumerate(ranks):
            process_.send("join", file=str(tmp_path / "store"), rank=rank, world=2)
        assert all("value" in process_.receive() for process_ in ranks)
        answers = both("load", repo=REPO, mesh=True, asks_once=True)
        assert all("value" in answer for answer in answers), answers
        assert answers[0]["value"] != answers[1]["value"]  # each its shards
        files = hub.files_sent()
        assert len(files) == len(set(files))
        assert sum(path.startswith("/api/models/") for _, path in hub.requests) <= 3
        # Both raise what one meets.
        hub.mode = "500"
        answers = both("load", repo="org/other", mesh=True)
        assert all("answered 500" in answer["error"] for answer in answers), answers
        hub.mode = "ok"
        shutil.rmtree(tmp_path / "hub")
        assert all("value" in answer for answer in both("load", repo=REPO, mesh=True))
