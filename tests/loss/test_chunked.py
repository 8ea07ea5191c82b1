from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from collectives import CollectiveLog
from harness import distributed
from loss import conformance
from loss.sizes import Storages
from ptx.loss import _column_stats as column_stats
from ptx.loss import chunked_ce, cross_entropy


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_conformance(chunk: int | None) -> None:
    for vocab_size in (10, 3):
        for case in conformance.cases(vocab_size, every_option=vocab_size == 10):
            conformance.check(_in_chunks(chunk), case)


@distributed(world_size=2)
def test_conformance_on_two_ranks() -> None:
    tp = init_device_mesh("cpu", (2,))
    for vocab_size in (10, 7):
        for case in conformance.cases(vocab_size, every_option=vocab_size == 10):
            conformance.check(_in_chunks(3, tp), case, gather=conformance.summed_over(tp))


@distributed(world_size=4)
def test_conformance_on_four_ranks() -> None:
    tp = init_device_mesh("cpu", (4,))
    for vocab_size in (10, 3):  # split into 3 3 3 1; 1 1 1 and an empty shard
        for case in conformance.cases(vocab_size, every_option=False):
            conformance.check(_in_chunks(3, tp), case, gather=conformance.summed_over(tp))


def test_the_result_is_the_same_for_any_chunk() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 40), torch.randint(40, (50,))
    losses = {chunked_ce(logits, labels, chunk_tokens=c).item() for c in (None, 1, 7, 50, 10**9)}
    assert len(losses) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_memory_is_a_chunk_and_the_gradient(dtype: torch.dtype, options: dict[str, Any]) -> None:
    vocab_size, chunk = 300, 4
    logits = torch.randn(8 * chunk, vocab_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab_size, (8 * chunk,))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with Storages() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = chunked_ce(logits, labels, chunk_tokens=chunk, **options)
    with Storages() as backward:
        (grad,) = torch.autograd.grad(loss, logits)
    limit = 4 * chunk * vocab_size
    assert forward.largest() == limit
    assert backward.largest(but=grad) <= limit
    assert backward.count(grad.nbytes) == 1
    beside = {t.untyped_storage().data_ptr(): t.nbytes for t in kept}
    assert beside.pop(logits.untyped_storage().data_ptr()) == logits.nbytes
    assert sum(beside.values()) <= 8 * 8 * labels.numel()  # a few numbers per label
    with Storages() as seen, torch.no_grad():
        chunked_ce(logits, labels, chunk_tokens=chunk, **options)
    assert seen.largest() == limit


def test_default_chunk_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_stats, "CPU_BLOCK", 4 * 300)
    logits, labels = torch.randn(32, 300, requires_grad=True), torch.randint(300, (32,))
    for chunk, rows in ((None, 4), (3, 3), (100, 4)):  # never more than are fast
        with Storages() as seen:
            (grad,) = torch.autograd.grad(chunked_ce(logits, labels, chunk_tokens=chunk), logits)
        assert seen.largest(but=grad) == 4 * rows * 300


@distributed(world_size=2)
def test_one_collective_forward_and_none_backward() -> None:
    tp = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    full, labels = torch.randn(6, 10), torch.randint(10, (6,))
    for layout, count in ((Shard(-1), 1), (Replicate(), 0)):
        logits = distribute_tensor(full, tp, [layout]).requires_grad_()
        with CollectiveLog() as forward:
            loss = chunked_ce(logits, labels, chunk_tokens=2)
        with CollectiveLog() as backward:
            loss.backward()
        assert forward.count() == forward.count("allgather") == count
        assert not backward.count()
        assert isinstance(logits.grad, DTensor)
        assert logits.grad.placements == logits.placements
        torch.testing.assert_close(loss, cross_entropy(full, labels))


@distributed(world_size=2)
def test_L07_bad_label_raises_on_every_rank_before_any_collective() -> None:
    tp = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(4, 7), tp, [Shard(-1)])
    with CollectiveLog() as seen, pytest.raises(ValueError, match=r"chunked_ce: .*\[0, 7\)"):
        chunked_ce(logits, torch.tensor([0, 3, 7, 1]))
    assert not seen.count()
    loss = chunked_ce(logits, torch.tensor([0, 3, 6, 1]))  # nobody was left in a collective
    assert loss.item() == pytest.approx(math.log(7), abs=1e-6)


def test_wrong_arguments() -> None:
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=rf"chunked_ce: z_loss=-1 .*chunk_tokens={bad} must"):
            chunked_ce(logits, labels, z_loss=-1, chunk_tokens=bad)
    with pytest.raises(ValueError, match=r"chunked_ce: labels \(2, 2\) must match .*; shift"):
        chunked_ce(logits, labels[:, 1:])
    with pytest.raises(ValueError, match=r"chunked_ce: .*vocab_size=6"):
        chunked_ce(logits, labels, vocab_size=6)


@pytest.mark.slow  # a minute of the C++ compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
def test_compiled_the_gradient_is_the_one_large_tensor() -> None:
    from torch._inductor.utils import run_and_get_code

    logits = torch.randn(48, 1000).bfloat16().requires_grad_()
    labels = torch.randint(900, (48,))

    def step() -> None:
        loss = compiled(logits, labels, label_smoothing=0.1, z_loss=0.1, vocab_size=900)
        loss.backward()

    torch._dynamo.reset()
    compiled = torch.compile(chunked_ce, fullgraph=True)
    _, codes = run_and_get_code(step)
    large = [line for code in codes for line in code.split("\n") if "cpu((48, 1000)" in line]
    assert len(large) == 1
    assert "bfloat16" in large[0]
    want = torch.autograd.grad(
        chunked_ce(logits, labels, label_smoothing=0.1, z_loss=0.1, vocab_size=900), logits
    )
    torch.testing.assert_close(logits.grad, want[0])


def _in_chunks(chunk: int | None, tp: DeviceMesh | None = None) -> Callable[..., Tensor]:
    """The loss as `conformance` calls it: on full logits, of which each rank uses its columns."""

    def loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if tp is not None:
            columns = logits.shape[-1]
            share = -(-columns // tp.size())
            first = min(tp.get_local_rank() * share, columns)
            logits = DTensor.from_local(
                logits[..., first : first + share],
                tp,
                [Shard(-1)],
                shape=logits.shape,
                stride=logits.contiguous().stride(),
            )
        return chunked_ce(logits, labels, chunk_tokens=chunk, **options)

    return loss
