"""One call of an object at a time, and in the process that made it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """Which process an object is of, and whether a call of it is under way."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()

    @property
    def in_fork(self) -> bool:
        return os.getpid() != self.pid


class HasCalls(Protocol):
    _calls: Calls


S = TypeVar("S", bound=HasCalls)


def one_at_a_time(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Refuse a call from a signal handler or thread during another, and any in a fork.

    Such a call would mix its messages, to the writer and the other ranks, with those of the other.
    """
    name = method.__name__.strip("_")

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._calls.in_fork:
            raise RuntimeError(
                f"{name}: this process is a fork of the one that made the {type(self).__name__}; call"
                " it there, or make another here"
            )
        if not self._calls.lock.acquire(blocking=False):
            raise RuntimeError(
                f"{name}: called during another call of this {type(self).__name__}, from a signal"
                " handler or another thread; set a flag there, and call it from the training loop"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._calls.lock.release()

    return call
