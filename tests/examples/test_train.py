"""The reference example, on every kind of mesh: the same losses, the same files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.figure  # noqa: F401  # here, so that ranks are forked with it
import pytest
import torch
from running import args_of, flags_of, write_small_corpus

import harness
import ptx
import train
from checks import check, refuse
from data import TOKENIZER
from models import check_model, choose_model

EXAMPLE = Path(train.__file__)
LOSSES = ("eager", "chunked", "vocab-parallel")
MESHES = {
    "1 process": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2}),
    "dp_shard 2 x tp 2": (4, {"tp": 2}),
    "accumulated, recomputed, in chunks": (2, {"grad_accum": 4, "ac": "full", "loss_chunk": 5}),
    **{f"{loss}, tp 2": (2, {"tp": 2, "loss": loss}) for loss in LOSSES},
    "eager": (1, {"loss": "eager"}),
}
SAME = ("train/loss", "grad/norm_preclip", "grad/norm", "param/norm", "input/max", "labels/valid")
SAME += ("train/epoch", "train/tokens_seen", "valid/loss")
SMALL = {"steps": 10, "global_batch": 8, "seq_len": 32, "log_every": 1, "warmup": 4, "lr": 6e-3}


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    return write_small_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt.xz")


@pytest.fixture(scope="module")
def metrics(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name):
        out = folder / name
        ranks, degrees = MESHES[name]
        args = args_of(**SMALL, **degrees, corpus=small_corpus, cache=folder, out=out)
        harness.run(_train_alone, ranks, args)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return {name: run(name) for name in MESHES}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_compiled_loss_gives_the_same_numbers(metrics, small_corpus, tmp_path):
    args = args_of(
        **SMALL, tp=2, loss="compiled", corpus=small_corpus, cache=tmp_path, out=tmp_path
    )
    harness.run(_train_alone, 2, args, timeout=250)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for got, want in zip(map(json.loads, lines), metrics["1 process"], strict=True):
        for key in SAME:
            if key in want:
                assert got[key] == pytest.approx(want[key], rel=1e-4), (got, want)


def _train_alone(args):
    """Without the end of a run: its sample and its report."""
    train.finish = lambda *_, log, **__: log.close()
    train.main(args)


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_losses_agree_with_one_process(metrics, name):
    for got, want in zip(metrics[name], metrics["1 process"], strict=True):
        for key in SAME:
            if key in want:
                assert got[key] == pytest.approx(want[key], rel=1e-4), (got, want)


def test_training_learns_and_metrics_have_the_names_of_the_inventory(metrics):
    steps, valid = metrics["1 process"][:-1], metrics["1 process"][-1]
    assert [m["train/iter"] for m in steps] == list(range(1, 11))
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 1
    times, memory = (
        {"dt", "dtd", "dtf", "dtb"},
        {"alloc", "peak_alloc", "reserved", "peak_reserved"},
    )
    train_ = {
        "iter",
        "epoch",
        "bidx",
        "loss",
        "tps",
        "tps_per_gpu",
        "tflops",
        "tokens_seen",
    } | times
    train_ |= {f"mem_{name}" for name in memory}
    names = {f"train/{name}" for name in train_} | {"grad/norm_preclip", "opt/lr", "opt/skipped"}
    names |= {
        f"{of}/{what}" for of in ("grad", "param") for what in ("norm", "max_abs", "nonfinite")
    }
    names |= {"input/max", "input/min", "labels/valid"}
    assert set(steps[0]) == names
    with_logits = {"logits/max_abs", "logits/nonfinite"}
    assert set(metrics["eager"][0]) == names | with_logits
    spread = {f"train/{name}/mean" for name in times}
    assert set(metrics["tp 2"][0]) > names | spread
    assert steps[0]["grad/norm"] == pytest.approx(steps[0]["grad/norm_preclip"], rel=1e-5)
    assert steps[-1]["train/tokens_seen"] == 10 * 8 * 32
    assert steps[-1]["opt/lr"] < steps[3]["opt/lr"] == pytest.approx(6e-3)
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
    flags = flags_of(**options)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
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
    (first,) = [line for line in lines if line.startswith("step     1/3  loss")]
    assert "ETA" in first
    assert "grad norm" in first
    assert any(line.startswith("Fellow-Citizens of the Senate and House") for line in lines)
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_all_that_a_run_leaves_behind(small_corpus, tmp_path, capfd):
    options = {**SMALL, "steps": 3, "dtype": "bf16", "valid_every": 2, "document_mask": True}
    options |= {"histograms": True, "profile": True, "profile_active": 1, "profile_wait": 0}
    args = args_of(
        **options,
        trackers=["csv"],
        watchdog=60,
        tokens=3 * 8 * 32,
        corpus=small_corpus,
        cache=tmp_path,
        out=tmp_path / "out",
    )
    harness.run(train.main, 1, args)
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["batches"]["global_batch"] == 8
    precision = json.loads((out / "precision.json").read_text())
    assert precision["precision/master"] == "float32"
    assert precision["precision/compute"] == "bfloat16"
    report = (out / "report.md").read_text()
    for part in ("3 steps, 768 tokens", "loss.png", "| bigram |", "`global_batch`", "A sample"):
        assert part in report
    assert len((out / "metrics.csv").read_text().splitlines()) > 3
    found = [json.loads(line) for line in (out / "histograms.jsonl").read_text().splitlines()]
    assert {h["step"] for h in found} == {2, 3}
    assert {h["name"].partition("/")[0] for h in found} == {"param", "grad", "activation"}
    assert (out / "profile" / "trace-0-0.json").stat().st_size > 1000


def test_random_tokens_have_nothing_to_continue(tmp_path):
    options = {**SMALL, "steps": 2, "valid_batches": 1}
    args = args_of(**options, data="random", random_vocab=97, cache=tmp_path, out=tmp_path)
    harness.run(train.main, 2, args)
    assert "A sample" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}], ids=["dp 2", "tp 2"])
def test_a_pretrained_model_is_fine_tuned_and_exported(small_corpus, tmp_path, degrees):
    torch.manual_seed(0)
    shape = ptx.ModelArgs(
        dim=36, n_layers=2, n_heads=3, vocab_size=4224, tie_embeddings=True, max_seq_len=64
    )
    base = ptx.Transformer(shape)  # tp 2 can't share 3 heads; the corpus has 4,096 entries
    ptx.save_hf(base, tmp_path / "base", tokenizer=TOKENIZER)
    options = {**SMALL, "steps": 4, "valid_batches": 1, "corpus": small_corpus, "cache": tmp_path}
    args = args_of(
        **options, **degrees, model=tmp_path / "base", export=tmp_path / "tuned", out=tmp_path
    )
    harness.run(train.main, 2, args)
    tuned = ptx.Transformer(ptx.ModelArgs.from_hf(tmp_path / "tuned"))
    ptx.load_hf(tuned, tmp_path / "tuned")
    tokens = torch.randint(4096, (1, 8))
    with torch.no_grad():
        moved = (tuned(tokens) - base(tokens)).abs().max()
    assert 1e-3 < moved < 10
    assert ptx.load_tokenizer(tmp_path / "tuned").vocab_size == 4096
    with pytest.raises(ValueError, match="is there already"):
        check(args)


def test_what_cannot_start_ends_with_its_reasons_and_no_stack(tmp_path, monkeypatch, capsys):
    places = {"out": tmp_path, "cache": tmp_path}
    args = args_of(**places)
    assert refuse(args) is args
    monkeypatch.setattr("checks.AFTER_RANK_0", 0.0)
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            refuse(args_of(steps=0, log_every=0, **places))
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            "train.py can't start:\n  --log-every is 0, it must be at least 1\n"
            "  --steps is 0, it must be at least 1\n"
        )


def test_explicit_sizes_beat_the_preset_and_what_cannot_fit_is_refused():
    model = args_of(model="agpt-2b", dim=64, n_heads=4, n_kv_heads=2).model
    chosen = choose_model(model, None, 100, 32)
    assert (chosen.dim, chosen.n_layers, chosen.vocab_size, chosen.max_seq_len) == (64, 12, 100, 32)
    assert chosen.ffn_width < 300  # follows from dim
    assert choose_model(args_of(vocab_size=128).model, None, 100, 32).vocab_size == 128
    with pytest.raises(ValueError, match=r"has 64 entries .* has 100; leave --vocab-size out"):
        choose_model(args_of(vocab_size=64).model, None, 100, 32)
    assert "choose one of debug, s," in check_model(args_of(model="huge").model)[0]
    assert "n_heads" in check_model(args_of(n_kv_heads=3).model)[0]
    (problem,) = check_model(args_of(model="org/name", dim=64, n_layers=1).model)
    assert problem == "--dim, --n-layers: org/name is pretrained, its sizes are fixed"


def test_a_pretrained_model_made_for_shorter_samples_is_refused(tmp_path):
    shape = ptx.ModelArgs(dim=8, n_layers=1, n_heads=1, vocab_size=50, max_seq_len=16)
    ptx.save_hf(ptx.Transformer(shape), tmp_path / "base")
    options = args_of(model=tmp_path / "base").model
    assert choose_model(options, tmp_path / "base", 40, 16).vocab_size == 50
    with pytest.raises(ValueError, match="has 51; use its own, without --tokenizer"):
        choose_model(options, tmp_path / "base", 51, 16)
    with pytest.raises(ValueError, match="made for 16 tokens, --seq-len is 17"):
        choose_model(options, tmp_path / "base", 40, 17)


def test_help_lists_every_option_in_groups_with_its_default():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "COLUMNS": "100"},  # more, and there are two columns
    )
    names = ["model", "data", "batches", "optim", "parallel", "saving", "logging", "profiling"]
    assert re.findall(r"─ (\w+) options ─", done.stdout) == names
    options = re.split(r"│ --", done.stdout)[1:]
    assert len(options) > 70
    assert all("default:" in option for option in options)
    assert "(default: 16)" in done.stdout


def test_arguments_that_cannot_work_are_refused_together(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    bad = args_of(
        steps=0, log_every=0, grad_accum=-1, model="nope", corpus=tmp_path, out=file, watchdog=-1
    )
    with pytest.raises(ValueError, match="steps") as raised:
        check(bad)
    for part in (
        "--steps",
        "--log-every",
        "--grad-accum",
        "'nope'",
        "is no file",
        str(file),
        "--watchdog",
    ):
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
            check(args_of(**values, **places))
    with pytest.raises(ValueError, match="isn't given"):
        check(args_of(stage_dir=tmp_path, **places))
    with pytest.raises(ValueError, match="needs a --stage-dir"):
        check(args_of(ckpt_dir="s3://bucket/run", **places))
    with pytest.raises(ValueError, match="'nothing' is no file, folder or glob"):
        check(args_of(data="nothing", **places))
    check(args_of(tp=2, grad_accum=4, dp_replicate=2, **places))
