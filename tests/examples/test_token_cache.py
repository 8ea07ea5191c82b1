"""Tokens on disk: whole or not there, made by one, and clear words when the disk is full."""

import errno
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest

import token_cache
from token_cache import TokenFile, cached_tokens, one_at_a_time


def filling(train, valid):
    def make(train_file, valid_file):
        for n in train:
            train_file.append(np.arange(n))
        valid_file.append(np.arange(valid))

    return make


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_what_was_appended_is_mapped(tmp_path, dtype):
    train, valid = cached_tokens(tmp_path / "new", "key", dtype, filling((3, 0, 12345), 2))
    assert isinstance(train, np.memmap)
    assert train.dtype == valid.dtype == dtype
    assert train.tolist() == [0, 1, 2, *range(12345)]
    assert valid.tolist() == [0, 1]
    again, _ = cached_tokens(tmp_path / "new", "key", dtype, lambda *_: pytest.fail("made again"))
    assert np.array_equal(train, again)


def test_ids_that_do_not_fit_are_never_cut_off(tmp_path):
    with pytest.raises(AssertionError), TokenFile(tmp_path / "a.npy", np.uint16) as file:
        file.append([2**16])
    assert list(tmp_path.iterdir()) == []


def test_of_many_at_once_one_does_the_work(tmp_path):
    together, made = Barrier(8), []

    def make(train, valid):
        made.append(1)
        time.sleep(0.2)
        filling((3,), 2)(train, valid)

    def rank(_):
        together.wait()
        return [part.tolist() for part in cached_tokens(tmp_path, "key", np.uint16, make)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(rank, range(8))) == [[[0, 1, 2], [0, 1]]] * 8
    assert made == [1]
    assert len(list(tmp_path.glob("*.npy"))) == 2
    assert not list(tmp_path.glob("*.part"))


def test_without_locks_all_do_it_and_get_the_same(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(token_cache.fcntl, "flock", no_locks)
    together = Barrier(4)

    def make(train, valid):
        together.wait()  # all four are writing
        filling((3, 60_000), 2)(train, valid)

    def rank(_):
        return cached_tokens(tmp_path, "key", np.uint16, make)[0].tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4))) == [[0, 1, 2, *range(60_000)]] * 4
    assert not list(tmp_path.glob("*.part"))


def _hold(folder):
    def make(train, valid):
        train.append([1])
        (folder / "started").touch()
        time.sleep(60)

    cached_tokens(folder, "key", np.uint16, make)


def test_a_process_that_is_killed_leaves_no_lock_and_no_half_file(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ValueError, match="waited 0 s for another process"):
        cached_tokens(tmp_path, "key", np.uint16, filling((3,), 2), wait=0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    train, _ = cached_tokens(tmp_path, "key", np.uint16, filling((3,), 2), wait=0.2)
    assert train.tolist() == [0, 1, 2]


@pytest.mark.parametrize("full", [0, 1])  # the file to train on, the held-out one
@pytest.mark.parametrize("tokens", [5, 60_000])  # written at the end, and at once
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, full, tokens):
    create, files = token_cache._create, []

    def created(path):
        files.append(path)
        # A real "No space left on device", of a device that is always full.
        return open("/dev/full", "wb") if len(files) == full + 1 else create(path)

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_create", created)
        with pytest.raises(OSError, match=r"disk of .* is full.* name another cache") as error:
            cached_tokens(tmp_path, "key", np.uint16, filling((tokens,), tokens))
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*.part"))
    train, _ = cached_tokens(tmp_path, "key", np.uint16, filling((tokens,), tokens))
    assert len(train) == tokens  # and the next run makes it good


def test_those_who_wait_fail_as_the_one_did_that_they_waited_for(tmp_path):
    begun, calls = Event(), []

    def make(train, valid):
        calls.append(1)
        begun.set()
        time.sleep(0.3)
        raise OSError(errno.ENOSPC, "full")

    def first():
        cached_tokens(tmp_path, "key", np.uint16, make)

    def second():
        begun.wait()
        cached_tokens(tmp_path, "key", np.uint16, make)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        with pytest.raises(OSError, match="full"):
            one.result()
        with pytest.raises(
            ValueError, match=r"process of this host that was to do it failed:.*full"
        ):
            two.result()
    assert calls == [1]
    with one_at_a_time(tmp_path / ".key.lock"):  # who comes later tries again
        pass
