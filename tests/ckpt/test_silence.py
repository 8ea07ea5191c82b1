"""What once went wrong without a word: each of these lost, changed or mixed up something in silence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.small import Small, save_filled, stopped_writer, writer_pid
from harness import distributed, run
from ptx.ckpt import (
    AsyncCheckpointer,
    PerRank,
    _commit,
    _disk,
    _slots,
    _writer_process,
    train_state,
)
from ptx.ckpt._store import LocalStore


class Fixed:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def spoil(root: Path, step: int) -> None:
    """Make a save under way fail."""
    [folder] = [name for name in os.listdir(root) if name.startswith(f".saving-{step}-")]
    shutil.rmtree(root / folder)


def test_a_failed_save_is_told_though_a_later_one_is_committed(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as c:
        c.save(0, small.state, block=True)
        with stopped_writer(c):
            first, second = c.save(1, small.state), c.save(2, small.state)
            spoil(tmp_path, 1)
        assert first is not None
        assert second is not None
        deadline = time.monotonic() + 20
        while not (tmp_path / "step-2").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for the report
        with pytest.raises(RuntimeError, match="save of step 1 failed"):
            c.wait()
        c.wait()
        assert (first.done, second.done) == (False, True)
        assert c.steps() == [0, 2]


@distributed(world_size=2)
def test_a_failed_save_of_one_rank_is_told_though_a_later_one_is_committed(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as c:
        c.save(0, small.state, block=True)
        with stopped_writer(c):
            first, second = c.save(1, small.state), c.save(2, small.state)
            assert first is not None
            assert second is not None
            if dist.get_rank() == 1:
                [folder] = tmp_path.glob(".saving-1-*")
                (folder / "rank-00001.distcp").mkdir()
            dist.barrier()
        deadline = time.monotonic() + 20
        while not (tmp_path / "step-2").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="save of step 1 failed"):
            c.wait()
        c.wait()
        assert (first.done, second.done) == (False, True)


def test_close_finishes_the_saves_behind_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writer_process, "STOP_SECONDS", 0.2)
    small, c = Small(), AsyncCheckpointer(tmp_path)
    c.save(0, small.state, block=True)
    pid = writer_pid(c)
    os.kill(pid, signal.SIGSTOP)
    c.save(1, small.state)
    c.save(2, small.state)
    c._flight.pending[0].failure = "as if it had"
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    timer.start()
    with pytest.raises(RuntimeError, match="save of step 1 failed: rank 0: as if it had"):
        c.close()
    timer.join()
    assert (tmp_path / "step-2").exists()


def test_an_exit_from_the_block_that_loses_a_save_has_exit_code_1(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from ckpt.small import *
from ckpt.test_silence import spoil
small, root = Small(), Path({str(tmp_path)!r})
with AsyncCheckpointer(root) as c:
    c.save(0, small.state, block=True)
    with stopped_writer(c):
        c.save(1, small.state)
        spoil(root, 1)
    sys.exit(0)
"""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "AsyncCheckpointer: step 1: " in done.stderr
    assert done.returncode == 1, done.stderr


def test_an_interrupted_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, c = Small(), AsyncCheckpointer(tmp_path)
    c.save(0, small.state, block=True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_slots.Slot, "stage", interrupt)
        with pytest.raises(KeyboardInterrupt):
            c.save(1, small.state)
    with pytest.raises(RuntimeError, match="save of step 1 failed: rank 0: KeyboardInterrupt"):
        c.close()  # and doesn't wait for ever


def test_calls_within_a_call_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, stage = Small(), _slots.Slot.stage
    with AsyncCheckpointer(tmp_path) as c:

        def stage_and_poll(*args: Any) -> None:
            stage(*args)
            with pytest.raises(RuntimeError, match="poll: called during another call"):
                c.poll()  # as from a signal handler

        monkeypatch.setattr(_slots.Slot, "stage", stage_and_poll)
        handle = c.save(1, small.state)
        assert handle is not None
        handle.wait()


def test_a_fork_leaves_the_writer_alone(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as c:
        c.save(0, small.state, block=True)
        pid = os.fork()
        if pid == 0:
            try:
                c.close()
                c.save(1, small.state)
            except BaseException as error:  # or this fork would run the other tests, too
                os._exit(0 if "is a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        before = writer_pid(c)
        c.save(1, small.state, block=True)
        assert writer_pid(c) == before


ODD = {
    "memmap": lambda path: np.memmap(path / "m", dtype="f4", mode="w+", shape=(5,)),
    "matrix": lambda path: np.asmatrix([[1, 2]]),
    "structured": lambda path: np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "record": lambda path: np.zeros(2, dtype=[("a", "i4")])[0],
    "tensor as key": lambda path: {torch.tensor(1): 2},
    "tensor in a key": lambda path: {(1, torch.tensor(1)): 2},
    "tensor in a set": lambda path: {torch.tensor(1)},
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", ODD)
def test_values_that_would_come_back_as_others_are_refused(name: str, tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path / "root") as c, pytest.raises(ValueError, match=r"save: '.*x"):
        c.save(1, {"x": Fixed(ODD[name](tmp_path))})


@pytest.mark.parametrize("per_rank", [False, True])
def test_an_extra_tensor_has_to_fit(per_rank: bool, tmp_path: Path) -> None:
    wrap: Any = PerRank if per_rank else lambda value: value
    with AsyncCheckpointer(tmp_path) as c:
        c.save(1, {"x": wrap(torch.tensor([3.5], dtype=torch.float64))}, block=True)
        longer = torch.zeros(5, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"has shape \(1,\) in it, \(5,\) here"):
            c.load({"x": wrap(longer)})
        whole = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(ValueError, match="would be cast"):
            c.load({"x": wrap(whole)})
        assert whole.item() == longer.sum() == 0
        single = torch.zeros(1)
        assert c.load({"x": wrap(single)}, allow_cast=True) == 1
    assert single.item() == 3.5


@pytest.mark.parametrize("key", ["a.b", "", 1])
def test_keys_are_names_without_dots(key: Any, tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as c:
        with pytest.raises(ValueError, match="names without dots"):
            c.save(1, {key: torch.ones(1)})
        with pytest.raises(ValueError, match="names without dots"):
            c.load({key: torch.ones(1)})


def test_what_was_saved_as_something_else_is_refused(tmp_path: Path) -> None:
    linear, small = nn.Linear(2, 2), Small()
    with AsyncCheckpointer(tmp_path) as c:
        c.save(1, {"a": Fixed(1), "b": linear}, block=True)
        for here, message in (
            ({"a": linear}, "'a' of .*: it wasn't saved as a model"),
            ({"a": small.state["optimizer"]}, "'a' of .*: it wasn't saved as an optimizer"),
            ({"b": torch.ones(2)}, "'b' of .*: what was saved isn't a Tensor"),
        ):
            with pytest.raises(ValueError, match=message):
                c.load(here)


@pytest.mark.parametrize("context", [torch.inference_mode(), torch.device("meta")])
def test_modes_around_a_call_do_not_matter(context: Any, tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path) as c:
        with context:
            c.save(1, small.state, block=True)
        small.step()
        c.save(2, small.state, block=True)
        other = Small(stepped=False)
        with context:
            assert c.load(other.state) == 2
    small.step()
    other.step()
    for got, want in zip(other.tensors(), small.tensors(), strict=True):
        assert torch.equal(got, want)


def test_a_group_of_new_parameters_keeps_its_options(tmp_path: Path) -> None:
    def build(**rates: float) -> Any:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in rates})
        groups = [
            {"params": layer.parameters(), "lr": rate}
            for layer, rate in zip(model.values(), rates.values())
        ]
        optimizer = torch.optim.SGD(groups, lr=0.0)
        return optimizer, train_state(model, optimizer)

    _, saved = build(a=1.0, b=2.0)
    optimizer, state = build(new=7.0, a=1.5, b=2.5)
    with AsyncCheckpointer(tmp_path) as c:
        c.save(1, saved, block=True)
        c.load(state, allow_missing=["model.new", "optimizer.state.new"])
    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 1.0, 2.0]


def test_values_that_share_memory_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def build(value: float) -> nn.Module:
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.full((2,), value)))
        model.register_buffer("b", torch.full((1,), value).expand(4))
        return model

    with AsyncCheckpointer(tmp_path) as c:
        c.save(1, {"m": build(1.0)}, block=True)
        here = build(2.0)
        with pytest.raises(ValueError, match=r"'m\.b' is expanded here"):
            c.load({"m": here})
    assert here.w.tolist() == [2.0, 2.0]


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    # Of one value each: contiguous, whatever its stride.
    views = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
    loaded: list[Any] = []
    with AsyncCheckpointer(tmp_path) as c:
        c.save(1, {"x": views}, block=True)
        c.load({"x": loaded})
    assert [value.item() for value in loaded] == [1 - 2j, -2.0]


def test_a_root_whose_name_is_not_text(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with AsyncCheckpointer(root, stage_dir=tmp_path / "stage") as c:
        save_filled(c, Small(), 3)
        assert c.latest() == 3


def save_other_keys(root: Path, kind: str) -> str:
    small, state = Small(), {}
    odd = dist.get_rank() == int(kind[-1])
    if kind.startswith("own") and odd:
        state["x"] = PerRank(Fixed(1))
    elif kind.startswith("kind"):
        state["x"] = PerRank(Fixed(1)) if odd else Fixed(1)
    elif kind.startswith("model") and odd:
        state["x"] = small.model
    elif odd:
        state["x"] = Fixed(1)
    with AsyncCheckpointer(root) as c, pytest.raises(ValueError, match="save: 'x'") as caught:
        c.save(1, {"y": Fixed(2), **state})
    return str(caught.value)


@pytest.mark.parametrize(
    "kind", [f"{k}{r}" for k in ("own", "kind", "model", "plain") for r in "01"]
)
def test_keys_that_only_some_ranks_save_are_refused(kind: str, tmp_path: Path) -> None:
    assert len(set(run(save_other_keys, 2, tmp_path, kind))) == 1


def test_a_slot_is_free_once_its_save_is_done(tmp_path: Path) -> None:
    small = Small()
    with AsyncCheckpointer(tmp_path, slots=1, on_busy="skip") as c:
        c.save(0, small.state, block=True)
        flight, reports = c._flight, []
        writer = flight._writer
        assert writer is not None
        original = writer.reports

        def late(seconds: float = 0.0) -> Any:  # "written" comes behind "committed"
            reports.extend(original(seconds))
            return [one for one in reports if one["event"] == "committed"]

        writer.reports = late  # type: ignore[method-assign]
        c.save(1, small.state, block=True)
        assert c.save(2, small.state) is not None


def test_a_part_that_is_still_being_uploaded_is_waited_for(tmp_path: Path) -> None:
    store, whole = LocalStore(str(tmp_path)), _disk.seal(b'{"file": null}')
    store.make("attempt")
    path = tmp_path / "attempt" / _disk.rank_file(0)
    path.write_bytes(whole[:-3])
    timer = threading.Timer(0.2, path.write_bytes, (whole,))
    timer.start()
    shared: Any = SimpleNamespace(
        store=store, alone=0.0, config={"commit_seconds": 9.0}, go_on=lambda job: None
    )
    assert _commit._wait_for_parts(shared, {"folder": "attempt", "world_size": 1}) == [
        {"file": None}
    ]
    timer.join()
