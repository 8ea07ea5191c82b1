"""The random generators that torch's checkpoint doesn't know of: their states, read and put back."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Generator:
    """A source of random numbers.

    Attributes:
        get: Its state, which compares by ``==``.
        set: Puts such a state back.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generators_in(module: nn.Module) -> list[Generator]:
    """Python's and numpy's own generators, and those that are attributes of a module of ``module``."""
    found = [Generator(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(
            Generator(
                lambda: pickle.dumps(numpy.get_state()),
                lambda state: numpy.set_state(pickle.loads(state)),
            )
        )
    values = {id(v): v for part in module.modules() for v in vars(part).values()}
    return found + [g for value in values.values() for g in _generator(value)]


def generator_of(value: torch.Generator) -> Generator:
    """One of torch's, which isn't a default one."""
    return Generator(
        lambda: bytes(value.get_state().tolist()),
        lambda state: value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    )


def _generator(value: Any) -> Iterator[Generator]:
    if isinstance(value, torch.Generator):
        yield generator_of(value)
    elif isinstance(value, random.Random):
        yield Generator(value.getstate, value.setstate)
    elif (bits := getattr(value, "bit_generator", None)) is not None:  # numpy's
        yield Generator(
            lambda: pickle.dumps(bits.state),
            lambda state: setattr(bits, "state", pickle.loads(state)),
        )
