"""One line that renews itself on a terminal, plain lines in a file."""

import io

import progress
from progress import ERASE, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(monkeypatch, *times):
    ticks = iter(times)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(ticks))


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    clock(monkeypatch, 0.0, 60.0, 70.0, 71.0)
    stream = io.StringIO()
    shown = Progress(100, stream=stream)
    shown.step(1, "loss 3.0")
    shown.say("saved")
    shown.step(11, "loss 2.0")
    shown.step(12, "loss 2.0")
    shown.close()
    # A first step of a minute, which compiled, and ten of a second: 89 seconds are left.
    assert stream.getvalue() == (
        "step     1/100  loss 3.0  ETA 1:39:00\n"
        "saved\n"
        "step    11/100  loss 2.0  ETA 1:29\n"
        "step    12/100  loss 2.0  ETA 1:28\n"
    )


def test_a_run_that_goes_on_counts_its_own_steps_only(monkeypatch):
    clock(monkeypatch, 0.0, 2.0)
    assert Progress(100, done=90, stream=io.StringIO()).eta(91) == "0:18"


def test_a_terminal_shows_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    clock(monkeypatch, 0.0, 1.0, 2.0)
    stream = Terminal()
    shown = Progress(4, stream=stream)
    shown.say("hello")
    shown.step(1, "loss 3.0")
    shown.say("saved")
    shown.step(2, "loss 2.0 " + "x" * 100)
    shown.close()
    first = "[#####---------------] 1/4  loss 3.0  ETA 0:03"
    second = ("[##########----------] 2/4  loss 2.0 " + "x" * 100)[:59]
    assert stream.getvalue() == (f"hello\n{ERASE}{first}{ERASE}saved\n{first}{ERASE}{second}\n")
