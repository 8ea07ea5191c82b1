"""The run's log: one line of JSON per record, whole after a resume, on one rank only."""

import json
import math

import pytest

from metrics import RunLog


def metrics(step, **more):
    return {
        "train/iter": step,
        "train/tokens_seen": step * 10,
        "train/loss": 3.0 / step,
        "train/tps": 1000.0,
        "grad/norm_preclip": 1.0,
        "opt/lr": 1e-3,
        **more,
    }


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_record_per_step_readable_at_once(tmp_path, capsys):
    log = RunLog(tmp_path / "run", 4, enabled=True, trackers=["csv"], config={"out": tmp_path})
    log.open(0, 0)
    log.step(metrics(1))
    log.record({"train/tokens_seen": 10, "valid/loss": 2.0})
    assert lines(tmp_path / "run") == [
        metrics(1),
        {"train/tokens_seen": 10, "valid/loss": 2.0},
    ]
    out = capsys.readouterr().out
    assert out.startswith(
        "step     1/4  loss 3.0000     1,000 tokens/s  grad norm 1.000  lr 1.0e-03"
    )
    assert "ETA" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"out": str(tmp_path)}
    log.note("precision", {"precision/master": "float32"})
    assert log.notes["precision"] == {"precision/master": "float32"}
    log.close()
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert rows[2].startswith("1,")  # the validation, at the step it came after


def test_a_run_that_goes_on_keeps_its_history_and_drops_the_steps_it_repeats(tmp_path):
    log = RunLog(tmp_path, 4, enabled=True)
    log.open(0, 0)
    log.record({"note": 1.0})
    for step in (1, 2, 3):
        log.step(metrics(step))
    log.file.write('{"train/iter": 4, "train/tok')  # killed while writing
    log.close()
    again = RunLog(tmp_path, 4, enabled=True)
    again.open(2, 20)
    again.step(metrics(3))
    again.close()
    resumed = {"train/tokens_seen": 20, "train/resumed_from": 2}
    assert lines(tmp_path) == [{"note": 1.0}, metrics(1), metrics(2), resumed, metrics(3)]
    assert again.records == lines(tmp_path)
    anew = RunLog(tmp_path, 4, enabled=True)
    anew.open(0, 0)
    anew.close()
    assert lines(tmp_path) == []


def test_a_loss_that_is_not_a_number_is_null_in_json(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    log = RunLog(tmp_path, 4, enabled=True)
    log.open(0, 0)
    log.step(metrics(1, **{"train/loss": math.nan, "grad/norm": math.inf}))
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["train/loss"] is None
    assert math.isnan(log.records[0]["train/loss"])
    again = RunLog(tmp_path, 4, enabled=True)
    again.open(1, 10)
    again.close()
    assert json.loads(text) == lines(tmp_path)[0]


def test_other_ranks_write_nothing(tmp_path, capsys):
    log = RunLog(tmp_path / "run", 4, enabled=False, trackers=["csv"])
    log.open(0, 0)
    log.step(metrics(1))
    log.say("hello")
    log.note("config", {})
    log.plot({})
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_records_after_the_end_are_no_error(tmp_path):
    log = RunLog(tmp_path, 1, enabled=True)
    log.open(0, 0)
    log.close()
    log.close()
    log.record(metrics(2))
    assert lines(tmp_path) == []
    with pytest.raises(KeyError):
        log.step({})
