"""What a step was fed and what it predicted: token range, labels that count, logits, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ROWS = 1024  # tokens whose logits are looked at together; bounds the copies


@torch.no_grad()
def batch_stats(
    tokens: Tensor,
    labels: Tensor,
    mesh: DeviceMesh,
    *,
    logits: LogitsWatch | None = None,
    ignore_index: int = -100,
) -> dict[str, float]:
    """For a log, as one process with the global batch would see it, and equal on all ranks.

    Args:
        tokens: [batch, seq], this rank's, all micro-batches together.
        labels: As ``tokens``; entries of ``ignore_index`` don't count.
        mesh: 1-D, of the ranks with different tokens: ``ptx.loss_mesh(mesh)``.
        logits: Takes what was seen since the last call, if anything.
        ignore_index: Label of positions without a loss.

    Returns:
        "input/max", "input/min", "labels/valid" and, if there were logits, "logits/max_abs" (of the
        finite ones) and "logits/nonfinite" (how many aren't).

    Cost: two all-reduces of three numbers, and one wait for the device; call it when logging.
    """
    seen = logits.take() if logits else None
    low, high = tokens.aminmax()
    largest, bad = seen if seen else (low.new_zeros((), dtype=torch.float32), low.new_zeros(()))
    tops = torch.stack([high.float(), -low.float(), largest.to(high.device)])  # ids are below 2**24
    sums = torch.stack([(labels != ignore_index).sum(), bad.to(high.device)])
    if mesh.size() > 1:
        dist.all_reduce(tops, dist.ReduceOp.MAX, mesh.get_group())
        dist.all_reduce(sums, dist.ReduceOp.SUM, mesh.get_group())
    (high_, low_, largest_), (valid, bad_) = tops.tolist(), sums.tolist()
    found = {"input/max": high_, "input/min": -low_, "labels/valid": valid}
    return found | ({"logits/max_abs": largest_, "logits/nonfinite": bad_} if seen else {})


class LogitsWatch:
    """Looks at the logits that a model returns, while ``on``; hidden states it lets pass.

    A loss that never has all logits (fused with the head) leaves nothing to look at.

    Args:
        model: Called with ``return_hidden=True`` when it returns no logits; after `apply_tp`.

    Cost: while on, one read of the logits and copies of at most `ROWS` tokens' of them; under tp two
    all-reduces of one number per forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._hook = model.register_forward_hook(self._look, with_kwargs=True)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Largest |logit| and number of non-finite ones of this rank's tokens, 0-dim; then forgets."""
        seen, self._seen = self._seen, []
        if not seen:
            return None
        largest, bad = (torch.stack(list(some)) for some in zip(*seen))
        return largest.amax(), bad.sum()

    def close(self) -> None:
        self._hook.remove()

    @torch.no_grad()
    def _look(self, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if not self.on or kwargs.get("return_hidden"):
            return
        local = output.to_local() if isinstance(output, DTensor) else output
        largest = torch.zeros((), device=local.device)
        bad = torch.zeros((), dtype=torch.int64, device=local.device)
        for rows in local.flatten(0, -2).split(ROWS):
            finite = rows.isfinite()
            bad += rows.numel() - finite.sum()
            if rows.numel():
                largest = torch.maximum(largest, rows.abs().where(finite, 0).amax().float())
        if isinstance(output, DTensor):
            for dim, placement in enumerate(output.placements):
                if placement.is_shard():
                    group = output.device_mesh.get_group(dim)
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
                    dist.all_reduce(bad, dist.ReduceOp.SUM, group)
        self._seen.append((largest, bad))
