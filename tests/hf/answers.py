"""The inside of a process that hub.Process talks to: each line of input is a call of a function by name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def join(file: str, rank: int, world: int) -> None:
    store = dist.FileStore(file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def answer_calls(*functions: Callable[..., object]) -> None:
    """Until the input ends: each answer is its value or its error, and the seconds it took."""
    torch.set_num_threads(1)
    by_name = {function.__name__: function for function in (join, *functions)}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        start = time.monotonic()
        try:
            answer: dict[str, object] = {"value": by_name[name](**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer), flush=True)
