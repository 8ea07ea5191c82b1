"""Run a test function on several gloo ranks, each a fresh fork of one process that did the imports.

A server process (``multiprocessing``'s forkserver) imports torch and the test modules once and never runs an op. Every
test forks its ranks from it, so a rank starts in milliseconds, no group, thread or tensor outlives its test, and the
last test of a session is as fast as the first. A rank that fails shows its own traceback and output; ranks that are
still busy a moment later, or at the timeout, are killed after printing their stacks.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

# Imported once by the server; the first test would otherwise pay for them on every rank.
PRELOAD = (
    "harness",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor._random",
    "torch._dynamo",
)
# Warnings of torch itself that no caller can avoid; everything else is an error on every rank, as in pyproject.toml.
ALLOWED_WARNINGS = (
    "`torch.jit.script_method` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    ".*should not be instantiated",  # dynamo, of any autograd.Function in compiled code
)
GROUP_TIMEOUT = datetime.timedelta(seconds=30)
GRACE_SECONDS = 2.0  # for the other ranks to notice that one failed, and say so


def distributed(world_size: int, *, timeout: float = 60.0) -> Callable[..., Any]:
    """Decorate a top-level test so that its body runs on ``world_size`` ranks with gloo initialised."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(fn)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run(fn, world_size, *args, timeout=timeout, **kwargs)

        return test

    return decorate


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank and return what each returned, in rank order.

    ``fn`` must be importable by name; arguments and results travel as plain pickles.
    """
    __tracebackhide__ = True  # the ranks' own tracebacks are what matters
    context = multiprocessing.get_context("forkserver")
    payload = pickle.dumps((args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ptx-ranks-") as folder:
        ranks, pipes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            target = (fn.__module__, fn.__qualname__, payload)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, folder, target, timeout, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(mine)
        try:
            answers = _collect(pipes, time.monotonic() + timeout + 1.0)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
        failures = [
            f"--- rank {rank} of {world_size}: {text}\n{_output(folder, rank)}"
            for rank, (ok, text) in enumerate(answers)
            if not ok
        ]
        if failures:
            raise AssertionError("\n".join([f"{fn.__qualname__} failed", *failures]))
        return [pickle.loads(value) for _, value in answers]


def preload(modules: Sequence[str]) -> None:
    """Have the server import ``modules`` (of the tests about to run) before it forks anything."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *modules])


def start_server() -> None:
    """Start the fork server now, with this process's import path."""
    from multiprocessing import forkserver

    before = os.environ.get("PYTHONPATH")
    # The server of Python 3.11 takes no sys.path from us (cpython#126631), so it would preload nothing.
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """Each rank's (ok, result or traceback); stops soon after the first failure, and at the deadline."""
    answers: list[tuple[bool, Any]] = [(False, "no answer: hung, see its stack")] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[rank] = (False, "died without an answer (killed, or the process aborted)")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    target: tuple[str, str, bytes],
    timeout: float,
    pipe: Connection,
) -> None:
    with open(Path(folder) / f"output-{rank}", "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(timeout, file=sys.stderr)
    signal.alarm(int(timeout) + 10)  # should the parent die, so that nothing is left behind
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore that would outlive this rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in ALLOWED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
            )
            module, qualname, payload = target
            args, kwargs = pickle.loads(payload)
            fn = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
            result = getattr(fn, "__wrapped__", fn)(*args, **kwargs)
            answer = pickle.dumps((True, pickle.dumps(result)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)
    if pickle.loads(answer)[0]:
        # Peers may still be connecting to this rank. A failed one leaves at once, so that they notice.
        pipe.poll(None)
    # Python's own teardown would wait for gloo threads whose peers are gone.
    os._exit(0)


def _output(folder: str, rank: int) -> str:
    path = Path(folder) / f"output-{rank}"
    text = path.read_text(errors="replace")[-8000:] if path.exists() else ""
    return f"--- rank {rank} printed:\n{text}" if text else ""
