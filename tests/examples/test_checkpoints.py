"""The reference example goes on after a crash, a kill, a SIGTERM and on another mesh, as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import args_of, flags_of, write_small_corpus

import checkpoints
import harness
import ptx
import train

EXAMPLE = Path(train.__file__)
SMALL = {"steps": 12, "global_batch": 8, "seq_len": 32, "log_every": 1, "warmup": 5}
SAVING = {"save_interval": 5, "valid_batches": 2}
MESHES = {"1": (1, {}), "dp 2": (2, {}), "tp 2": (2, {"tp": 2})}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"corpus": write_small_corpus(folder / "corpus.txt.xz"), "cache": folder}


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory):
    """A run on two ranks that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    harness.run(train.main, 2, args_of(**SMALL, **SAVING, **places, out=out), timeout=110)
    return _records(out)


def _crash(args):
    """Runs until step 8 is done, of which step 5 is saved."""
    after = checkpoints.Saves.after

    def crashing(self, step, state, *, last):
        cost = after(self, step, state, last=last)
        if step == 8:
            self.checkpointer.wait()
            raise KeyboardInterrupt
        return cost

    checkpoints.Saves.after = crashing
    with pytest.raises(KeyboardInterrupt):
        train.main(args)


@pytest.mark.parametrize(
    ("first", "then"),
    [*((2, then) for then in MESHES), (4, "dp 2")],
    ids=lambda value: str(value),
)
def test_resumed_is_uninterrupted(places, whole, tmp_path, first, then):
    args = {**SMALL, **SAVING, **places, "out": tmp_path, "ckpt_dir": tmp_path / "ckpt"}
    harness.run(_crash, first, args_of(**args), timeout=110)
    assert [r["train/iter"] for r in _records(tmp_path) if "train/iter" in r] == list(range(1, 9))
    ranks, degrees = MESHES[then]
    harness.run(train.main, ranks, args_of(**args, **degrees), timeout=110)
    got = _records(tmp_path)
    assert sum("train/restart_seconds" in r for r in got) == 1
    assert sum("train/ckpt_stage_seconds" in r for r in got) == 3  # steps 5, 10 and 12
    got, want = ([r for r in rs if "train/iter" in r or "valid/loss" in r] for rs in (got, whole))
    for after, before in zip(got, want, strict=True):
        for key in ("train/iter", "train/tokens_seen", "opt/lr", "train/loss", "valid/loss"):
            exact = (first, then) == (2, "dp 2")
            if key in before:
                assert after[key] == (
                    before[key] if exact else pytest.approx(before[key], rel=1e-5)
                )


def test_no_resume_starts_anew(places, whole, tmp_path):
    args = {**SMALL, **SAVING, **places, "out": tmp_path, "ckpt_dir": tmp_path / "ckpt"}
    harness.run(_crash, 2, args_of(**args), timeout=110)
    harness.run(train.main, 2, args_of(**args, resume=False), timeout=110)
    losses = [
        [r["train/loss"] for r in rs if "train/loss" in r] for rs in (_records(tmp_path), whole)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_saves_and_exits_0(number, places, tmp_path):
    flags = {**SMALL, **places, "steps": 10**6, "out": tmp_path, "ckpt_dir": tmp_path / "ckpt"}
    command = [sys.executable, EXAMPLE, *flags_of(**flags), "--valid-every=1000000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        _wait_for_step(tmp_path, 3)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    stopped = int(output.rsplit("stopped after step ", 1)[1].split(",")[0])
    assert (tmp_path / "ckpt" / f"step-{stopped}" / "manifest.json").exists()


def _press_ctrl_c_twice(folder):
    with checkpoints.Saves(folder, 0, None) as saves:
        signal.raise_signal(signal.SIGINT)
        saves.after(1, {"w": torch.ones(2)}, last=False)
        assert saves.stopping
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    harness.run(_press_ctrl_c_twice, 1, tmp_path)
    assert (tmp_path / "step-1" / "manifest.json").exists()


@pytest.mark.timeout(300)
def test_a_killed_rank_is_restarted_and_goes_on(places, whole, tmp_path):
    flags = {**SMALL, **SAVING, **places, "save_interval": 1, "out": tmp_path}
    flags["ckpt_dir"] = tmp_path / "ckpt"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "--max-restarts=3", EXAMPLE, *flags_of(**flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        _wait_for_step(tmp_path, 3)
        worker = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[-1]
        os.kill(int(worker), signal.SIGKILL)
        assert process.wait(timeout=200) == 0
    losses = [
        [r["train/loss"] for r in rs if "train/loss" in r] for rs in (_records(tmp_path), whole)
    ]
    assert losses[0] == losses[1]


def _records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _wait_for_step(out, step):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        path = out / "metrics.jsonl"
        if path.exists() and f'"train/iter": {step},' in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in {out}")


def _save_six(folder):
    model = torch.nn.Linear(2, 2)
    state = ptx.train_state(model)
    options = {"keep_every": 4, "stage_dir": folder / "stage"}
    with checkpoints.Saves(f"file://{folder}/root", 1, 1, **options) as saves:
        assert saves.resume(state) == 0
        for step in range(1, 7):
            assert saves.after(step, state, last=False).keys() == {"train/ckpt_stage_seconds"}
    with checkpoints.Saves(f"file://{folder}/root", 1, 1, **options) as saves:
        assert saves.resume(state) == 6
        assert saves.checkpointer.steps() == [4, 6]


def test_a_url_with_a_stage_and_every_fourth_kept(tmp_path):
    harness.run(_save_six, 1, tmp_path)
