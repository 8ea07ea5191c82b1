"""The reference example, on every kind of mesh: the same losses, the same files."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import train
from arguments import check
from data import CORPUS

EXAMPLE = Path(train.__file__)
LOSSES = ("eager", "chunked", "compiled", "vocab-parallel")
MESHES = {
    "1 process": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "dp_replicate 2": (2, {"dp_replicate": 2}),
    "4 ranks": (4, {}),
    "dp_shard 2 x tp 2": (4, {"tp": 2}),
    "accumulated, recomputed": (2, {"grad_accum": 4, "ac": "full"}),
    **{f"{loss}, tp 2": (2, {"tp": 2, "loss": loss}) for loss in LOSSES},
    "eager": (1, {"loss": "eager"}),
}
SMALL = {"steps": 20, "global_batch": 8, "seq_len": 32, "log_every": 1, "warmup": 5}


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt.xz"
    with lzma.open(CORPUS, "rt") as whole, lzma.open(path, "wt", preset=0) as some:
        some.writelines(line[:6000] + "\n" for line, _ in zip(whole, range(12)))
    return path


@pytest.fixture(scope="module")
def metrics(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name):
        out = folder / name
        ranks, degrees = MESHES[name]
        args = train.Args(**SMALL, **degrees, corpus=small_corpus, cache=folder, out=out)
        harness.run(train.main, ranks, args)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return {name: run(name) for name in MESHES}


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_losses_agree_with_one_process(metrics, name):
    for got, want in zip(metrics[name], metrics["1 process"], strict=True):
        for key in ("train/loss", "grad/norm_preclip", "grad/norm", "param/norm", "valid/loss"):
            if key in want:
                assert got[key] == pytest.approx(want[key], rel=1e-4), (got, want)


def test_training_learns_and_metrics_have_the_names_of_the_inventory(metrics):
    steps, valid = metrics["1 process"][:-1], metrics["1 process"][-1]
    assert [m["train/iter"] for m in steps] == list(range(1, 21))
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 1
    train_ = {"iter", "loss", "dt", "tps", "tps_per_gpu", "tflops", "tokens_seen"}
    memory = {"mem_alloc", "mem_peak_alloc", "mem_reserved", "mem_peak_reserved"}
    names = {f"train/{name}" for name in train_ | memory} | {"grad/norm_preclip", "opt/lr"}
    names |= {
        f"{of}/{what}" for of in ("grad", "param") for what in ("norm", "max_abs", "nonfinite")
    }
    assert set(steps[0]) == names
    assert steps[0]["grad/norm"] == pytest.approx(steps[0]["grad/norm_preclip"], rel=1e-5)
    assert steps[-1]["train/tokens_seen"] == 20 * 8 * 32
    assert steps[-1]["opt/lr"] < steps[4]["opt/lr"] == pytest.approx(3e-3)
    assert set(valid) == {"train/tokens_seen", "valid/loss"}


def test_torchrun_runs_the_same_file_without_a_warning(small_corpus, tmp_path):
    options = {
        **SMALL,
        "steps": 3,
        "tp": 2,
        "corpus": small_corpus,
        "cache": tmp_path,
        "out": tmp_path,
    }
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=4",
            EXAMPLE,
            *flags,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 3 + 1  # on one rank only
    assert "ETA" in lines[1]
    assert "grad norm" in lines[1]
    assert any(line.startswith("Fellow citizens of the Senate") for line in lines)
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_bf16(small_corpus, tmp_path):
    options = {**SMALL, "steps": 2}
    args = train.Args(**options, dtype="bf16", corpus=small_corpus, cache=tmp_path, out=tmp_path)
    harness.run(train.main, 1, args)


def test_help_lists_every_option_with_its_default():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--help"], capture_output=True, text=True, timeout=100, check=True
    )
    for name in train.Args.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in done.stdout
    assert "default: 16" in done.stdout


def test_arguments_that_cannot_work_are_refused_together(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    bad = train.Args(steps=0, log_every=0, grad_accum=-1, model="nope", corpus=tmp_path, out=file)
    with pytest.raises(ValueError, match="steps") as raised:
        check(bad)
    for part in ("--steps", "--log-every", "--grad-accum", "'nope'", "is no file", str(file)):
        assert part in str(raised.value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    places = {"out": tmp_path / "out", "cache": tmp_path}
    for wrong, reason in {
        "tp=3": "must divide 4 ranks",
        "global_batch=6": "multiple of 4 data ranks x 1",
        "grad_accum=3": "multiple of 4 data ranks x 3",
        "tp=2,seq_len=255": "multiple of --tp 2",
        "dp_shard=3": "isn't the number of ranks",
    }.items():
        values = {k: int(v) for k, v in (pair.split("=") for pair in wrong.split(","))}
        with pytest.raises(ValueError, match=reason):
            check(train.Args(**values, **places))
    check(train.Args(tp=2, grad_accum=4, dp_replicate=2, **places))
