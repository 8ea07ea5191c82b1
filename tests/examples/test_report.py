"""report.md: what happened in a run, with pictures where matplotlib is."""

import sys

from report import write_report

MIB = 2**20


def records():
    for step in range(1, 21):
        yield {
            "train/iter": step,
            "train/tokens_seen": step * 100_000,
            "train/loss": 8.0 / step,
            "train/tps": 1000.0 + step,
            "train/dt": 30.0 if step == 1 else 0.5,
            "train/dtf": 0.2,
            "train/dtb": 0.25,
            "train/dtd": 0.01,
            "train/mfu": 0.4,
            "train/mem_alloc": 100 * MIB,
            "train/mem_peak_alloc": 200 * MIB,
            "grad/norm_preclip": 1 / step,
            "param/norm": 10.0 + step,
            "opt/lr": 1e-3,
        }
        if step == 10:
            yield {"train/tokens_seen": 1_000_000, "train/resumed_from": 10}
        if step == 11:
            yield {"train/tokens_seen": 1_100_000, "train/restart_seconds": 4.5}
    yield {"train/tokens_seen": 2_000_000, "valid/loss": 0.5}


def test_a_whole_report(tmp_path):
    path = write_report(
        tmp_path / "run",
        list(records()),
        title="debug, 20 steps",
        baselines={"unigram": 6.0, "bigram": 4.5},
        facts={"Configuration": {"lr": 3e-3, "prompt": "a|b\nc"}},
        sample=("Fellow citizens:", "Fellow citizens: the state\n\nof the Union"),
    )
    text = path.read_text()
    for part in (
        "# debug, 20 steps\n",
        "- 20 steps, 2,000,000 tokens",
        "loss 8.000 at step 1, 0.400 at the last",
        "- median speed 1,011 tokens/s",
        "utilisation 40.0%",
        "- went on from the checkpoint of step 10, 4.5 s after the restart",
        "unigram and bigram counts reach",
        "| bigram | 4.500 | 90.0 |",
        "| this model | 0.500 | 1.6 |",
        "> **Fellow citizens:** the state\n> \n> of the Union",
        "| `prompt` | a\\|b c |",
    ):
        assert part in text, part
    for name in ("loss", "gradients", "speed", "schedule"):
        assert f"({name}.png)" in text
        assert (tmp_path / "run" / f"{name}.png").stat().st_size > 5000


def test_what_was_not_measured_is_left_out(tmp_path, recwarn):
    bare = {"train/iter": 1, "train/tokens_seen": 1, "train/loss": float("nan")}
    text = write_report(tmp_path, [bare], title="x").read_text()
    assert "Validation" not in text
    assert "speed" in text
    assert "No step was logged" in write_report(tmp_path, [], title="x").read_text()
    assert not list(recwarn)


def test_without_matplotlib_the_text_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = write_report(tmp_path, list(records()), title="x").read_text()
    assert "- 20 steps" in text
    assert "png" not in text
    said = capsys.readouterr().err
    assert said == "no pictures in report.md: pip install matplotlib\n"
