from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from harness import distributed
from ptx.loss import cross_entropy, token_mean, token_scale
from ptx.mesh import build_mesh, loss_mesh

W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
X = torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, -1.0], [1.0, 1.0], [3.0, 0.5], [-1.0, 0.25]])
Y = torch.tensor([0, -100, 2, 1, 0, 2])


def test_L01_accumulated_micro_batches_weigh_every_token_the_same(one_rank: DeviceMesh) -> None:
    batches = list(zip(X[:4].split(2), Y[:4].split(2), strict=True))
    want, want_grad = _single_process(X[:4], Y[:4])
    assert want.item() == pytest.approx(2.48947, abs=1e-5)

    weight = W.clone().requires_grad_()
    scale = token_scale([labels for _, labels in batches], one_rank)
    total = 0.0
    for inputs, labels in batches:
        loss = cross_entropy(inputs @ weight.T, labels, reduction="sum") * scale
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(2.48947, abs=1e-5)  # a mean of the two means gives 2.25497
    torch.testing.assert_close(weight.grad, want_grad, atol=1e-6, rtol=0)


# The window of each of two ranks, as a list of micro-batches.
RAGGED = {
    "uneven": ([Y[:3]], [Y[3:]]),
    "one rank empty": ([Y[:3]], [torch.full((3,), -100)]),
    "windows": ([Y[:1], Y[1:3]], [torch.full((2,), -100), Y[5:]]),
    "nobody": ([torch.full((3,), -100)], [torch.full((3,), -100)]),
}


@distributed(world_size=2)
def test_L02_L04_averaged_gradients_are_those_of_all_tokens() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    mine = X[:3] if rank == 0 else X[3:]
    for name, windows in RAGGED.items():
        all_labels = torch.cat([part for window in windows for part in window])
        want, want_grad = _single_process(X, all_labels)
        scale = token_scale(windows[rank], mesh)
        assert scale.dtype == torch.float32
        assert scale.shape == ()
        assert scale == 2 / max(1, int((all_labels != -100).sum())), name

        # What FSDP does to gradients, by hand, and FSDP itself.
        for model in (_head(), fully_shard(_head(), mesh=mesh)):
            logged = torch.zeros(())
            start = 0
            for labels in windows[rank]:
                inputs = mine[start : start + len(labels)]
                start += len(labels)
                loss = cross_entropy(model(inputs), labels, reduction="sum") * scale
                loss.backward()
                logged += loss.detach()
            grad = model.weight.grad
            assert grad is not None
            if isinstance(model, FSDPModule):
                grad = grad.full_tensor()
            else:
                dist.all_reduce(grad)
                grad = grad / 2
            torch.testing.assert_close(grad, want_grad, atol=1e-6, rtol=1e-6, msg=name)
            dist.all_reduce(logged)
            torch.testing.assert_close(logged / 2, want, atol=1e-6, rtol=1e-6, msg=name)
    # Not by chance: averaging the means of the ranks would be far off.
    means = sum(_single_process(X[i : i + 3], Y[i : i + 3])[1] for i in (0, 3)) / 2
    assert (means - _single_process(X, Y)[1]).abs().max() > 0.03


@distributed(world_size=2)
def test_L03_token_mean_over_batches_and_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    loss_sum = torch.tensor([2.0, 90.0])[rank]
    count = torch.tensor([1, 9])[rank]
    batches = [(torch.tensor(2.0), torch.tensor(1)), (torch.tensor(90.0), torch.tensor(9))]
    both, nothing = [list(column) for column in zip(*batches, strict=True)], [[], []]
    for sums, counts in (
        (loss_sum, count),
        (loss_sum.item(), count.item()),
        ([loss_sum.bfloat16().requires_grad_()], [count]),
        both if rank == 0 else nothing,  # a rank without a batch
        (torch.stack(both[0]), torch.stack(both[1])) if rank == 1 else (0, 0),
    ):
        mean = token_mean(sums, counts, mesh)
        assert mean.dtype == torch.float32
        assert not mean.requires_grad
        assert mean.item() == pytest.approx(9.2, abs=1e-6)  # a mean of the means gives 6
    assert token_mean(torch.zeros(()), 0, mesh) == 0
    assert token_mean([2.0**24, 1.0, -(2.0**24)], [1], mesh) == 1  # 0 in float32
    assert token_mean(math.nan, 1, mesh).isnan()


@distributed(world_size=2)
def test_L07_one_bad_label_on_one_rank_raises_on_all() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    for bad in (7, -1):
        labels = torch.tensor([0, 3, bad if rank == 1 else 2, -100])
        with pytest.raises(
            ValueError, match=rf"\[0, 7\).*; 1 are not, {rank} of them on this rank"
        ):
            token_scale([labels, torch.tensor([1])], mesh, vocab_size=7)
    good = torch.tensor([0, 6, -100])
    assert token_scale(good, mesh, vocab_size=7) == 0.5
    assert token_scale(torch.tensor([0, 6, 0]), mesh, vocab_size=7, ignore_index=0) == 1


@distributed(world_size=4)
def test_tp_ranks_are_counted_once() -> None:
    for degrees in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}, {"tp": 4}):
        mesh = build_mesh(device_type="cpu", **({"dp_shard": 1} | degrees))
        where = loss_mesh(mesh)
        labels = torch.arange(3 + where.get_local_rank())  # 3, 4, ... kept, the same on tp ranks
        kept = sum(3 + rank for rank in range(where.size()))
        want = torch.tensor(where.size() / kept)
        assert torch.equal(token_scale(labels, where, vocab_size=7), want), degrees
        mean = token_mean(labels.sum().float(), labels.numel(), where)
        total = sum(sum(range(3 + rank)) for rank in range(where.size()))
        torch.testing.assert_close(mean, torch.tensor(total / kept))
    with pytest.raises(ValueError, match=r"'tp'\), it must be the 1-D mesh .* loss_mesh\(mesh\)"):
        token_scale(labels, mesh)
    with pytest.raises(ValueError, match="token_mean: the mesh has dims"):
        token_mean(1.0, 1, mesh["dp_shard", "tp"])


def test_wrong_labels_are_refused(one_rank: DeviceMesh) -> None:
    byte = torch.tensor([156, 1], dtype=torch.uint8)  # 156 is -100 to a byte
    assert token_scale(byte, one_rank) == 0.5
    with pytest.raises(ValueError, match=r"labels are torch\.float32"):
        token_scale(torch.zeros(3), one_rank)
    with pytest.raises(ValueError, match="empty list"):
        token_scale([], one_rank)
    labels = distribute_tensor(torch.arange(3), one_rank, [Replicate()])
    with pytest.raises(ValueError, match=r"DTensor .* pass the plain tensor"):
        token_scale([labels], one_rank)
    with pytest.raises(ValueError, match=r"\[0, 2\).*1 are not"):
        token_scale(torch.arange(3), one_rank, vocab_size=2)


def _head() -> nn.Linear:
    head = nn.Linear(2, 3, bias=False)
    head.weight.data.copy_(W)
    return head


def _single_process(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    weight = W.clone().requires_grad_()
    total = F.cross_entropy(inputs @ weight.T, labels, reduction="sum")
    loss = total / max(1, int((labels != -100).sum()))
    loss.backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad
