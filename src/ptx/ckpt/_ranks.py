"""The few small collectives of a checkpointer, all on the main thread and on a gloo group of its own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """The ranks of a gloo group, or this process alone if torch.distributed isn't initialised.

    Args:
        group: With a backend for CPU tensors. None: a new gloo group over all ranks, which every
            rank then has to make at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and "cpu:" not in dist.get_backend_config(group):
            raise ValueError(
                f"AsyncCheckpointer: process_group has no backend for CPU tensors, only"
                f" {dist.get_backend_config(group)}; pass a gloo group, or none"
            )
        self._own = group is None and dist.is_available() and dist.is_initialized()
        self.group = dist.new_group(backend="gloo") if self._own else group
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.size = dist.get_world_size(self.group) if self.group else 1
        if self.rank < 0:
            raise ValueError("AsyncCheckpointer: this rank isn't in process_group")

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """``numbers`` of each rank."""
        if self.size == 1:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    def start_max(self, numbers: list[int]) -> Maximum:
        """Begins the elementwise maximum over ranks; nobody waits yet."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return Maximum(mine, self.group, self.size)

    def gather_objects(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        """Each rank's value on rank 0, [] elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def scatter_from_first(self, values: list[T] | None) -> T:
        """This rank's of the values that rank 0 has for each."""
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group=self.group, group_src=0)
        return mine[0]  # type: ignore[no-any-return]

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]  # type: ignore[no-any-return]

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error: ValueError if each is one, else RuntimeError."""
        if any(failed for (failed,) in self.gather([int(error is not None)])):
            raise self.joined(error) from error

    def joined(self, error: Exception | None) -> Exception:
        """One error of what the ranks have; a collective."""
        mine = None if error is None else (isinstance(error, ValueError), str(error))
        found = [(rank, *e) for rank, e in enumerate(self.gather_objects(mine)) if e is not None]
        texts = dict.fromkeys(text for *_, text in found)
        if len(texts) == 1 and len(found) == self.size:
            text = next(iter(texts))
        else:
            text = "; ".join(f"rank {rank}: {text}" for rank, _, text in found[:8])
        return ValueError(text) if all(is_value for _, is_value, _ in found) else RuntimeError(text)

    @property
    def gone(self) -> bool:
        """Whether the group was destroyed meanwhile."""
        return self.size > 1 and not dist.is_initialized()

    def close(self) -> None:
        if self._own and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._own = False


class Maximum:
    """An all-reduce under way."""

    def __init__(self, numbers: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        self._numbers = numbers
        self._work: Any = None
        if size > 1:
            self._work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        return self._numbers.tolist()
