"""What the losses allocate and communicate: nothing that grows as [N, V], and nothing twice."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

import harness
import ptx
from collectives import CollectiveLog
from loss import conformance_mesh, conformance_model
from loss.conformance_losses import (
    CHUNKED,
    LOSSES,
    OF_HIDDEN,
    OF_LOGITS,
    fits,
    of_hidden,
    of_logits,
)
from loss.conformance_table import GROUPS, PLACEMENTS, Cell
from loss.sizes import Sizes
from ptx.loss import _column_stats as column_stats

WIDTH, CHUNK, TOKENS = 4, 16, 8 * 16
CLASSES = 6001  # divided by neither 2 nor 4
FSDP = [placement for placement, degrees in PLACEMENTS.items() if "dp_shard" in degrees]
TP = [placement for placement, degrees in PLACEMENTS.items() if "tp" in degrees]


class HeadOnly(nn.Module):
    """A model whose body does nothing, so that all there is to see is the loss's."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, classes, bias=False)

    def forward(self, hidden: Tensor, return_hidden: bool = True) -> Tensor:
        return hidden if return_hidden else self.output(hidden)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_tensor_is_larger_than_a_chunk_of_logits(placement: str) -> None:
    harness.run(_watch_sizes, _world(placement), placement)


@pytest.mark.parametrize("placement", FSDP)
def test_head_is_gathered_once_per_micro_batch_and_reduced_once_per_window(placement: str) -> None:
    harness.run(_count_fsdp, _world(placement), placement)


@pytest.mark.parametrize("placement", TP)
def test_one_exchange_per_loss_and_one_sum_of_the_hidden_gradient(placement: str) -> None:
    harness.run(_count_tp, _world(placement), placement)


def _watch_sizes(placement: str) -> None:
    mesh = ptx.build_mesh(**PLACEMENTS[placement], device_type="cpu")
    columns = -(-CLASSES // mesh["tp"].size())
    column_stats.CPU_BLOCK = CLASSES  # float32 copies of a row at a time
    for loss, dtype in product(
        (x for x in LOSSES if x in CHUNKED), (torch.float32, torch.bfloat16)
    ):
        for reduction in ("mean", "sum", "none"):
            what = f"{placement}: {loss}, {dtype}, {reduction}"
            call, given, gradients = _prepare(mesh, loss, dtype, reduction)
            with Sizes(*given) as sizes:
                call()
            chunk = CHUNK * columns * dtype.itemsize
            size, shape, op = sizes.largest
            if loss in OF_LOGITS:  # beside them their gradient, and a chunk in float32 or two
                assert size <= gradients, f"{what}: {shape} by {op}"
                peak = gradients + 2 * CHUNK * columns * 4 + 100 * TOKENS
                assert sizes.peak <= peak, f"{what}: {sizes.peak} bytes, not {peak}"
                continue
            assert size <= chunk, f"{what}: {shape} by {op}"
            # One chunk, gradients, for bfloat16 the weight's sum; a row; statistics of tokens.
            sums = 4 * columns * WIDTH if dtype == torch.bfloat16 else 0
            if mesh["dp_shard"].size() > 1:  # the gathered head, and its gradient to be reduced
                sums += 3 * columns * WIDTH * dtype.itemsize
            peak = chunk + gradients + sums + 2 * 4 * CLASSES + 100 * TOKENS
            assert sizes.peak <= peak, f"{what}: {sizes.peak} bytes, not {peak}"


def _prepare(
    mesh: DeviceMesh, loss: str, dtype: torch.dtype, reduction: str
) -> tuple[Any, list[Tensor], int]:
    """The loss as a call, the tensors that exist before it, the bytes of the gradients it makes."""
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (TOKENS,))
    if loss in OF_LOGITS:
        logits = torch.randn(TOKENS, CLASSES).to(dtype)
        if mesh["tp"].size() > 1:
            logits = distribute_tensor(logits, mesh["tp"], [Shard(-1)])
        logits.requires_grad_()
        options = {"reduction": reduction, "chunk_tokens": CHUNK, "vocab_size": CLASSES}
        local = logits.to_local() if isinstance(logits, DTensor) else logits

        def gradient() -> tuple[Tensor, ...]:  # not into .grad, of which autograd makes a copy
            total = of_logits(loss, logits, labels, mesh["tp"], **options).sum()
            return torch.autograd.grad(total, logits)

        return gradient, [local, labels], local.nbytes
    model = _wrapped(mesh, HeadOnly(CLASSES).to(dtype))
    hidden = model(torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_())
    weight = model.output.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    options = {"reduction": reduction, "chunk_tokens": CHUNK}
    columns = -(-CLASSES // mesh["tp"].size())
    return (
        lambda: of_hidden(loss, hidden, model.output, labels, **options).sum().backward(),
        [hidden, local, labels],
        2 * hidden.nbytes + columns * WIDTH * dtype.itemsize,
    )


def _wrapped(mesh: DeviceMesh, model: HeadOnly) -> HeadOnly:
    plan = {"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    ptx.apply_tp(model, mesh["tp"], plan)
    dp = ptx.fsdp_mesh(mesh)
    return ptx.apply_fsdp2(model, dp, units=[]) if dp.size() > 1 else model


def _count_fsdp(placement: str) -> None:
    """By the size of what is communicated, which tells the head's group from the others."""
    mesh = conformance_model.build_mesh(placement)
    for loss, group in product([x for x in LOSSES if x in OF_HIDDEN], GROUPS):
        _count_group(mesh, placement, Cell(loss=loss, group=group, reduction="sum", chunk=3))


def _count_group(mesh: DeviceMesh, placement: str, cell: Cell) -> None:
    group, what = cell.group, f"{placement}: {cell}"
    model = conformance_model.wrapped(mesh, cell)
    tokens, labels, _ = conformance_model.data(cell, ptx.data_mesh(mesh).get_local_rank())
    size = _group_bytes(model, group, mesh)

    def micro_batch(backward: bool = True) -> list[Counter[tuple[str, int]]]:
        logs = [CollectiveLog() for _ in range(3)]
        with logs[0]:
            states = model(tokens, return_hidden=True)
        with logs[1]:
            value = conformance_mesh.loss_of(model, states, labels, mesh["tp"], cell)
        with logs[2]:
            if backward:
                value.backward()
        return [log.calls for log in logs]

    forward, in_loss, backward = micro_batch()
    gather, reduce = ("_allgather_base_", size), ("_reduce_scatter_base_", size)
    assert forward[gather] + in_loss[gather] + backward[gather] == 1, (what, size, forward)
    assert in_loss[gather] == (group == "alone"), (what, in_loss)
    assert backward[reduce] == 1, (what, size, backward)
    assert not forward[reduce] + in_loss[reduce], what
    if "dp_replicate" in PLACEMENTS[placement]:
        assert backward["allreduce_", size // 2] == 1, (what, backward)
    names = [name for name in backward if name[0].startswith("_reduce_scatter")]
    first = names[0] == reduce  # before any other group's, so while their backward goes on
    assert first == (group in ("alone", "with norm")), (what, names)

    window: Counter[tuple[str, int]] = Counter()
    for i in range(3):
        with ptx.accumulate_grads(model, last=i == 2):
            window += sum(micro_batch(), Counter())
    assert window[reduce] == 1, (what, window)
    assert window[gather] <= 3, (what, window)

    with torch.no_grad():
        forward, in_loss, _ = micro_batch(backward=False)
    # apply_fsdp2 frees a shared group when the model's call without gradients ends.
    again = group in ("with norm", "tied with norm")
    assert forward[gather] + in_loss[gather] == 1 + again, (what, forward, in_loss)
    assert all(isinstance(p, DTensor) for p in model.output.parameters()), what
    # torch keeps the order of that forward, and has the next backward prefetch its last group.
    micro_batch()
    model.zero_grad()


def _group_bytes(model: ptx.Transformer, group: str, mesh: DeviceMesh) -> int:
    """Of all shards of the head's group: of each parameter as many rows as fill every shard."""
    members = {
        "alone": [model.output],
        "with norm": [model.norm, model.output],
        "tied with norm": [model.tok_embeddings, model.norm, model.output],
    }.get(group, [model.tok_embeddings, model.norm, model.output])  # the root: all but the block
    shards, total, mesh_dims = mesh["dp_shard"].size(), 0, ptx.fsdp_mesh(mesh).ndim
    for p in {p: None for member in members for p in member.parameters()}:
        rows = p.shape[0]
        if p.device_mesh.ndim > mesh_dims and p.placements[-1].is_shard():
            share = -(-rows // mesh["tp"].size())
            rows = min(share, rows - mesh["tp"].get_local_rank() * share)
        total += shards * -(-rows // shards) * math.prod(p.shape[1:]) * 4
    return total


def _count_tp(placement: str) -> None:
    mesh = ptx.build_mesh(**PLACEMENTS[placement], device_type="cpu")
    tp, fsdp = mesh["tp"], ptx.fsdp_mesh(mesh).size() > 1
    torch.manual_seed(0)
    labels = torch.randint(13, (2, 8))
    labels[0, 3] = -100
    kinds = {"": 3, "label_smoothing": 4, "entropy": 4}
    for loss, option in product(LOSSES, kinds):
        value = {"label_smoothing": 0.1, "entropy": True}.get(option)
        options = {option: value} if option else {}
        if not fits(loss, options):
            continue
        for layout, chunk in product((None, Replicate(), Shard(1)), (None, 5)):
            what = f"{placement}: {loss}, {options}, {layout}, {chunk}"
            more = options | ({"chunk_tokens": chunk} if loss in CHUNKED else {})
            if loss in OF_LOGITS:
                logits = distribute_tensor(torch.randn(2, 8, 13), tp, [Shard(-1)]).requires_grad_()
                with CollectiveLog() as forward:
                    got = of_logits(loss, logits, labels, tp, 13, **more)
                with CollectiveLog() as backward:
                    got.backward()
                assert forward.calls == {("allgather_", 4 * kinds[option] * 16): 1}, (
                    what,
                    forward.calls,
                )
                assert not backward.calls, (what, backward.calls)
                continue
            model = _wrapped(mesh, HeadOnly(13))
            hidden = torch.randn(2, 8, WIDTH)
            if layout is not None:
                hidden = distribute_tensor(hidden, tp, [layout])
            hidden = model(hidden.requires_grad_())
            with CollectiveLog() as forward:
                got = of_hidden(loss, hidden, model.output, labels, **more)
            with CollectiveLog() as backward:
                got.backward()
            split = layout == Shard(1)
            assert forward.calls["allgather_", 4 * kinds[option] * 15] == 1, (what, forward.calls)
            assert forward.count() == 1 + split + fsdp, (what, forward.calls)
            assert backward.count("reduce_scatter_tensor") == split, (what, backward.calls)
            assert backward.count("allreduce") == (not split), (what, backward.calls)
            assert backward.count() == 1 + fsdp, (what, backward.calls)


def _world(placement: str) -> int:
    return math.prod(PLACEMENTS[placement].values())
