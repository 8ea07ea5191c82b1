"""One `step` per step, whatever was asked for; nothing at all if nothing was."""

import json
import sys
import types

import pytest
import torch

from profiling import make_profiler


def run(profiler, steps):
    with profiler:
        for _ in range(steps):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()


def fail(profiler, error):
    with profiler:
        profiler.step()
        raise error


def test_nothing_when_off(tmp_path):
    run(make_profiler(tmp_path / "profile", 0), 3)
    run(make_profiler(tmp_path / "profile", 1, profile=True, rank_zero_only=True), 3)
    assert not (tmp_path / "profile").exists()


def test_traces_and_tables_by_the_schedule(tmp_path):
    profiler = make_profiler(
        tmp_path / "profile",
        2,
        profile=True,
        wait=1,
        warmup=1,
        active=2,
        repeat=2,
    )
    run(profiler, 10)
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {f"trace-2-{cycle}.{kind}" for cycle in (0, 1) for kind in ("json", "txt")}
    for cycle in (0, 1):
        trace = json.loads((tmp_path / "profile" / f"trace-2-{cycle}.json").read_text())
        events = [event.get("name", "") for event in trace["traceEvents"]]
        # Steps 0 and 1 of each cycle of four are not kept.
        kept = {name for name in events if name.startswith("ProfilerStep#")}
        assert kept == {f"ProfilerStep#{4 * cycle + step}" for step in (2, 3)}
        table = (tmp_path / "profile" / f"trace-2-{cycle}.txt").read_text()
        assert "aten::mm" in table
        assert "Self CPU" in table


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def full(self, path):
        raise OSError("no space left")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    run(make_profiler(tmp_path, 0, profile=True, wait=0, warmup=1, active=1, repeat=2), 6)
    said = capsys.readouterr().err
    assert said.count("isn't whole: OSError") == 2
    assert "no space left" in said


class Sampler:
    running = False

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def output_html(self):
        assert not self.running
        return "<html>"


def test_pyinstrument_also_when_the_run_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyinstrument", types.SimpleNamespace(Profiler=Sampler))
    with pytest.raises(KeyboardInterrupt):
        fail(make_profiler(tmp_path, 1, pyinstrument=True), KeyboardInterrupt)
    assert (tmp_path / "pyinstrument-1.html").read_text() == "<html>"


def test_what_is_missing_is_said_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    run(make_profiler(tmp_path / "profile", 0, pyinstrument=True, snapshot=True), 2)
    assert not (tmp_path / "profile").exists()
    assert capsys.readouterr().err == (
        "no pyinstrument profile: pip install pyinstrument\n"
        "no memory snapshot: torch keeps no history of allocations on CPU\n"
    )


def test_a_memory_snapshot_is_written_when_the_run_fails(tmp_path, monkeypatch):
    calls = []
    memory = types.SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _dump_snapshot=lambda path: calls.append(path),
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(MemoryError):
        fail(make_profiler(tmp_path, 0, snapshot=True), MemoryError)
    assert calls == [
        {"max_entries": 100_000},
        str(tmp_path / "memory-0.pickle"),
        {"enabled": None},
    ]


def test_torch_still_has_the_private_functions_of_the_snapshot():
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
