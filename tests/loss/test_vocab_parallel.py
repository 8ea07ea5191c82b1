from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import distributed
from loss import conformance
from loss.sizes import Storages
from ptx.loss import _column_stats as column_stats
from ptx.loss import vocab_parallel_ce


@distributed(world_size=2)
def test_conformance_on_two_ranks() -> None:
    tp = init_device_mesh("cpu", (2,))
    for vocab_size in (10, 7):
        for case in conformance.cases(vocab_size, every_option=vocab_size == 10):
            conformance.check(_on_slices(tp), case, gather=conformance.summed_over(tp))


@distributed(world_size=4)
def test_conformance_on_four_ranks() -> None:
    tp = init_device_mesh("cpu", (4,))
    for vocab_size in (10, 12, 3):  # split into 3 3 3 1; 3 3 3 3; 1 1 1 and an empty shard
        for case in conformance.cases(vocab_size, every_option=False):
            conformance.check(_on_slices(tp), case, gather=conformance.summed_over(tp))


def test_conformance_on_one_rank(one_rank: DeviceMesh) -> None:
    for case in conformance.cases(7, every_option=False):
        conformance.check(_on_slices(one_rank), case)


@pytest.mark.parametrize("block", [1, 50])  # elements: one row at a time; an uneven number of rows
def test_result_does_not_depend_on_blocks(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(column_stats, "CPU_BLOCK", block)
    for case in conformance.cases(7, every_option=False):
        conformance.check(_on_slices(one_rank), case)


@distributed(world_size=2)
def test_L06_smoothing_is_over_the_global_vocabulary() -> None:
    tp = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    full = torch.randn(6, 8, dtype=torch.float64)
    labels = torch.tensor([0, 3, 5, 7, 2, 6])
    loss = _on_slices(tp)(full, labels, vocab_size=8, label_smoothing=0.1)
    assert loss.item() == pytest.approx(3.3297121, abs=1e-6)
    everyone = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(everyone, loss)
    assert torch.equal(everyone[0], everyone[1])
    huge = _on_slices(tp)(full.float() * 1000, labels, vocab_size=8, label_smoothing=0.1)
    assert huge.isfinite()


@distributed(world_size=2)
def test_L04_and_M11_no_kept_label_and_padded_columns() -> None:
    tp = init_device_mesh("cpu", (2,))
    mine = torch.randn(4, 4, requires_grad=True)
    for reduction in ("mean", "sum"):
        mine.grad = None
        nothing = torch.full((4,), -100)
        loss = vocab_parallel_ce(mine, nothing, tp, vocab_size=8, reduction=reduction)
        loss.backward()
        assert loss == 0
        assert torch.equal(mine.grad, torch.zeros(4, 4))
    zeros = torch.zeros(3, 4, requires_grad=True)
    labels = torch.tensor([0, 5, -100])
    loss = vocab_parallel_ce(zeros, labels, tp, vocab_size=6, padded_size=8)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(6), abs=1e-6)
    if tp.get_local_rank() == 1:  # columns 4 to 7, of which 6 and 7 are padding
        assert torch.equal(zeros.grad[:, 2:], torch.zeros(3, 2))
        assert (zeros.grad[:2, :2] != 0).all()


@distributed(world_size=2)
def test_L07_bad_label_raises_on_every_rank_before_any_collective() -> None:
    tp = init_device_mesh("cpu", (2,))
    mine = torch.zeros(4, 4 - tp.get_local_rank())  # V = 7
    for bad in (7, -1):
        with _Collectives() as seen, pytest.raises(ValueError, match=rf"the first is {bad}"):
            vocab_parallel_ce(mine, torch.tensor([0, 3, bad, 1]), tp, vocab_size=7)
        assert not seen.sent
    with pytest.raises(ValueError, match=r"\[0, 6\)"):  # a padding column is no class
        vocab_parallel_ce(mine, torch.tensor([0, 3, 6, 1]), tp, vocab_size=6, padded_size=7)
    # Nobody was left in a collective: the next loss is right.
    loss = vocab_parallel_ce(mine, torch.tensor([0, 3, 6, 1]), tp, vocab_size=7)
    assert loss.item() == pytest.approx(math.log(7), abs=1e-6)


@distributed(world_size=4)
def test_one_small_collective_forward_and_none_backward() -> None:
    tp = init_device_mesh("cpu", (4,))
    labels = torch.randint(12, (5,), generator=torch.Generator().manual_seed(0))
    for options, kinds in (
        ({}, 3),
        ({"z_loss": 0.1, "softcap": 5.0}, 3),
        ({"label_smoothing": 0.1}, 4),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.randn(5, 3, dtype=dtype, requires_grad=True)
            with _Collectives() as forward:
                loss = vocab_parallel_ce(mine, labels, tp, vocab_size=12, **options)
            with _Collectives() as backward:
                loss.backward()
            assert [numel for _, numel in forward.sent] == [kinds * 5], forward.sent
            assert not backward.sent


def test_allocates_one_gradient_and_no_other_tensor_of_that_size(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_stats, "CPU_BLOCK", 4 * 9)
    labels = torch.arange(16) % 9
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(16, 9, dtype=dtype, requires_grad=True)
        with Storages() as seen:
            vocab_parallel_ce(logits, labels, one_rank, vocab_size=9).backward()
        large = {at for at, size in seen.sizes.items() if size >= logits.nbytes}
        assert large == {logits.grad.untyped_storage().data_ptr()}, seen.sizes
        with Storages() as seen, torch.no_grad():
            vocab_parallel_ce(logits, labels, one_rank, vocab_size=9)
        assert not [size for size in seen.sizes.values() if size >= logits.nbytes]


@distributed(world_size=2)
def test_dtensor_and_wrong_arguments() -> None:
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tp = grid["tp"]
    torch.manual_seed(0)
    full, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    logits = distribute_tensor(full, tp, [Shard(-1)]).requires_grad_()
    target = distribute_tensor(labels, tp, [Replicate()])
    loss = vocab_parallel_ce(logits, target, tp, vocab_size=7)
    torch.testing.assert_close(loss, F.cross_entropy(full.flatten(0, 1), labels.flatten()))
    loss.backward()
    assert isinstance(logits.grad, DTensor)
    assert logits.grad.placements == logits.placements

    # Each error is the same on both ranks; otherwise one of them would wait for the other.
    with pytest.raises(ValueError, match=r"must be Shard\(-1\) over"):
        vocab_parallel_ce(distribute_tensor(full, tp, [Shard(0)]), labels, tp, vocab_size=7)
    with pytest.raises(
        ValueError, match=r"must have [34] columns on this rank, its share of 7 over 2"
    ):
        vocab_parallel_ce(full, labels, tp, vocab_size=7)
    with pytest.raises(ValueError, match=r"vocab_size=9 must be an int in \[1, padded_size=8\]"):
        vocab_parallel_ce(full[..., :4], labels, tp, vocab_size=9, padded_size=8)
    with pytest.raises(ValueError, match=r"dims \('dp', 'tp'\), it must be 1-D"):
        vocab_parallel_ce(full[..., :4], labels, grid, vocab_size=8)
    with pytest.raises(ValueError, match=r"labels \(2, 2\) must match"):
        vocab_parallel_ce(full[..., :4], labels[:, 1:], tp, vocab_size=8)
    with pytest.raises(ValueError, match="vocab_parallel_ce: reduction='avg'"):
        vocab_parallel_ce(full[..., :4], labels, tp, vocab_size=8, reduction="avg")  # type: ignore[arg-type]


def _on_slices(tp: DeviceMesh) -> Callable[..., Tensor]:
    """The loss as `conformance` calls it: on full logits, of which each rank uses its columns."""

    def loss(logits: Tensor, labels: Tensor, *, vocab_size: int, **options: Any) -> Tensor:
        columns = logits.shape[-1]
        share = -(-columns // tp.size())
        first = min(tp.get_local_rank() * share, columns)
        mine = logits[..., first : first + share]
        padded = columns if columns > vocab_size else None
        return vocab_parallel_ce(
            mine, labels, tp, vocab_size=vocab_size, padded_size=padded, **options
        )

    return loss


class _Collectives(TorchDispatchMode):
    """Every collective with the number of elements this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sent = args[1] if "allgather" in str(func) else args[0]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            self.sent.append((str(func), sum(t.numel() for t in tensors)))
        return func(*args, **(kwargs or {}))
