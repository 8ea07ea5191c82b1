"""Trackers get what metrics.jsonl gets, and none of them can stop a run."""

import csv
import sys
import types

import pytest

import trackers
from trackers import CsvTracker, Trackers, missing_packages


class Memory:
    def __init__(self, fails_at=None):
        self.got, self.fails_at, self.closed = [], fails_at, False

    def log(self, metrics, step):
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        self.got.append((step, dict(metrics)))

    def close(self):
        self.closed = True


class Other(Memory):
    def close(self):
        raise OSError("disk full")


def test_a_failing_tracker_is_named_once_and_dropped(tmp_path, capsys):
    good, bad = Memory(), Other(fails_at=2)
    both = Trackers((), tmp_path, more=[bad, good])
    for step in (1, 2, 3):
        both.log({"train/loss": 1.0}, step)
    both.close()
    assert [step for step, _ in good.got] == [1, 2, 3]
    assert [step for step, _ in bad.got] == [1]
    assert good.closed
    assert capsys.readouterr().err == (
        "tracker Other failed, going on without it: ConnectionError('no route to host')\n"
    )
    closing = Trackers((), tmp_path, more=[Other()])
    closing.close()
    assert "disk full" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch, name):
    for module in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    opened = Trackers([name], tmp_path)
    opened.log({"train/loss": 1.0}, 1)
    assert opened.open == {}
    said = capsys.readouterr().err
    assert said == (
        f"tracker {name} failed, going on without it: {name} needs a package: pip install {name}\n"
    )


def test_missing_packages_are_found_before_anything_starts(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert missing_packages(["csv", "wandb"]) == ["wandb needs a package: pip install wandb"]
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    assert missing_packages(["csv", "wandb"]) == []


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_gets_columns_as_they_come_and_goes_on(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvTracker(path)
    log.log({"train/loss": 2.5}, 1)
    log.log({"valid/loss": 2.0}, 1)
    log.log({"train/loss": 2.25}, 2)
    assert [row["train/loss"] for row in read(path)] == ["2.5", "", "2.25"]
    assert [row["valid/loss"] for row in read(path)] == ["", "2.0", ""]
    with path.open("a") as file:
        file.write("3,2.1")  # killed while writing
    again = CsvTracker(path, step=1)
    again.log({"train/loss": 2.125}, 2)
    assert [(row["step"], row["train/loss"]) for row in read(path)] == [
        ("1", "2.5"),
        ("1", ""),
        ("2", "2.125"),
    ]
    CsvTracker(path).log({"other": 1}, 1)
    assert read(path) == [{"step": "1", "other": "1"}]


class Run:
    def __init__(self, **options):
        self.options, self.got = options, []

    def log(self, metrics, step):
        self.got.append((step, metrics))

    def finish(self):
        self.got.append("finished")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_that_goes_on_is_one_run_at_the_tracker(tmp_path, monkeypatch, name):
    runs = []

    def init(**options):
        runs.append(Run(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    for step in (0, 5, 0):
        with_config = Trackers([name], tmp_path, config={"out": tmp_path, "lr": 0.1}, step=step)
        with_config.log({"train/loss": 1.0}, step + 1)
        with_config.close()
    assert [run.got for run in runs] == [
        [(step + 1, {"train/loss": 1.0}), "finished"] for step in (0, 5, 0)
    ]
    assert all(run.options["resume"] == "allow" for run in runs)
    assert runs[0].options["config"] == {"out": str(tmp_path), "lr": 0.1}
    key = "id" if name == "wandb" else "name"
    first, second, third = (run.options[key] for run in runs)
    assert first == second != third


def test_tensorboard_drops_what_a_later_run_does_again(tmp_path, monkeypatch):
    made = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step, []))

        def add_scalar(self, name, value, step):
            made[-1][2].append((name, value, step))

        def close(self):
            made[-1][2].append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    for step in (0, 5):
        opened = Trackers(["tensorboard"], tmp_path, step=step)
        opened.log({"a": 1.0, "b": 2.0}, step + 1)
        opened.close()
    folder = str(tmp_path / "tensorboard")
    assert made == [
        (folder, None, [("a", 1.0, 1), ("b", 2.0, 1), "closed"]),
        (folder, 6, [("a", 1.0, 6), ("b", 2.0, 6), "closed"]),
    ]
