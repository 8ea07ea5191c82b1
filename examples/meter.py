"""All that is logged of a training step: the same numbers on every mesh, and little time for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ptx
from across_ranks import across_ranks
from batch_stats import LogitsWatch, batch_stats
from batches import TrainBatches
from timing import Part, StepTimer


class Meter:
    """Measures steps; all ranks call each method.

    Args:
        model: After all ``apply_*`` calls.
        mesh: Of `ptx.build_mesh`.
        batches: That the model is trained on.
        dtype: That it computes in, for the peak that MFU relates to.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, batches: TrainBatches, dtype: torch.dtype
    ) -> None:
        self.model, self.batches = model, batches
        self.losses = ptx.loss_mesh(mesh)
        self.device = torch.device(mesh.device_type)
        sample = torch.zeros(batches.global_batch, batches.seq_len, dtype=torch.int64)
        self.tokens_per_step = sample.numel()
        self.flops = ptx.estimate_flops_fake(model, sample)  # of a step, on all ranks together
        self.peak = ptx.peak_flops(dtype=dtype)
        self.logits = LogitsWatch(model)
        self.timer = StepTimer(self.device)
        self._stats: dict[str, float] = {}

    def start(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches; time counts from here."""
        self.timer = StepTimer(self.device)
        return self.timer.data(batches)

    def part(self, name: Part) -> AbstractContextManager[None]:
        """Around forward and backward of each micro-batch."""
        return self.timer.part(name)

    def paused(self) -> AbstractContextManager[None]:
        """Around what isn't training."""
        self.logits.on = False
        return self.timer.paused()

    def look(self, on: bool) -> None:
        """Whether this step will be logged; before its forward."""
        self.logits.on = on

    def before_clipping(self) -> None:
        """Of a step that will be logged: norms, largest entries and non-finite ones, by now whole."""
        self._stats = ptx.model_stats(self.model).flat()

    def flat(self, step: int, loss: Tensor, tokens: Tensor, labels: Tensor) -> dict[str, float]:
        """The metrics of a step, under the names of docs/inventory.md.

        Args:
            step: From 1.
            loss: This rank's sum over micro-batches of the scaled losses, 0-dim.
            tokens: This rank's, of all micro-batches.
            labels: As ``tokens``.

        Cost: five small all-reduces or gathers and their waits, once per logged step.
        """
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.losses.get_group())
        times = self.timer.flat()
        memory = ptx.memory_report(self.device).flat()
        speed = ptx.throughput(
            self.flops,
            self.tokens_per_step,
            times["train/dt"],
            devices=dist.get_world_size(),
            peak=self.peak,
        )
        epoch, batch = self.batches.epoch_size, self.batches.global_batch
        return {
            "train/iter": step,
            "train/epoch": step * batch // epoch,
            "train/bidx": step * batch % epoch // batch,
            "train/tokens_seen": step * self.tokens_per_step,
            "train/loss": loss.item(),
            **speed.flat(),
            **self._stats,
            **batch_stats(tokens, labels, self.losses, logits=self.logits),
            **times,
            **memory,
            **across_ranks(times | memory, self.device),
        }
