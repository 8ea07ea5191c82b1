from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from harness import distributed
from loss import conformance
from ptx.loss import chunked_ce, cross_entropy


@pytest.mark.parametrize("vocab_size", [10, 3])
def test_conformance(vocab_size: int) -> None:
    for case in conformance.cases(vocab_size, every_option=vocab_size == 10):
        conformance.check(cross_entropy, case)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_L16_options_switched_off_are_torch_bit_for_bit(reduction: str, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 33), torch.randint(33, (7,))
    labels[3] = -100
    want, want_grad = _grad(
        F.cross_entropy, logits, labels, reduction=reduction, label_smoothing=smoothing
    )
    given = {"reduction": reduction} | ({"label_smoothing": smoothing} if smoothing else {})
    for options in (given, conformance.DEFAULTS | given, given | {"vocab_size": 33}):
        loss, grad = _grad(cross_entropy, logits, labels, **options)
        assert torch.equal(loss, want), options
        assert torch.equal(grad, want_grad), options

    exact = logits.double()
    with_z = cross_entropy(exact, labels, **given, z_loss=1e-4)
    squares = torch.logsumexp(exact, -1).square() * (labels != -100)
    parts = {"mean": squares.sum() / 6, "sum": squares.sum(), "none": squares}
    difference = with_z - cross_entropy(exact, labels, **given)
    torch.testing.assert_close(difference, 1e-4 * parts[reduction], atol=1e-7, rtol=0)


def test_L04_no_kept_label_gives_zero_and_zero_gradients() -> None:
    for shape in ((3, 5), (0, 5)):
        labels = torch.full(shape[:1], -100)
        for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"reduction": "sum"}):
            loss, grad = _grad(cross_entropy, torch.randn(shape), labels, **options)
            assert loss == 0
            assert torch.equal(grad, torch.zeros(shape))
    assert F.cross_entropy(torch.randn(3, 5), torch.full((3,), -100)).isnan()  # what this is about


def test_L07_label_out_of_range_raises() -> None:
    for bad in (7, -1, 10**9):
        with pytest.raises(ValueError, match=rf"\[0, 7\).*1 of 4 are not, the first is {bad}"):
            cross_entropy(torch.zeros(4, 7), torch.tensor([0, 3, bad, 1]))
    with pytest.raises(ValueError, match=r"\[0, 6\)"):  # a padding column is no class
        cross_entropy(torch.zeros(1, 8), torch.tensor([6]), vocab_size=6)


def test_L18_softcap_is_applied() -> None:
    logits, label = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([1])
    assert cross_entropy(logits, label, softcap=1.0).item() == pytest.approx(2.3041632, abs=1e-6)
    assert cross_entropy(logits, label).item() == pytest.approx(3.2413113, abs=1e-6)


def test_M11_padded_vocabulary_gets_no_probability() -> None:
    loss, grad = _grad(cross_entropy, torch.zeros(3, 8), torch.tensor([0, 5, -100]), vocab_size=6)
    assert loss.item() == pytest.approx(math.log(6), abs=1e-6)
    assert torch.equal(grad[:, 6:], torch.zeros(3, 2))
    assert grad[0, 1] > 0


def test_wrong_arguments_say_what_and_how_to_fix_it() -> None:
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"reduction='avg'.*label_smoothing=2.*z_loss=-1.*softcap=0"
    ):
        cross_entropy(logits, labels, reduction="avg", label_smoothing=2, z_loss=-1, softcap=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ignore_index=None.*logit_scale=tensor"):
        cross_entropy(logits, labels, ignore_index=None, logit_scale=torch.ones(()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels \(2, 2\) must match .* \(2, 3\); shift"):
        cross_entropy(logits, labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels are torch\.float32"):
        cross_entropy(logits, labels.float())
    with pytest.raises(ValueError, match=r"torch\.int64 must be floating"):
        cross_entropy(logits.long(), labels)
    with pytest.raises(ValueError, match="vocab_size=6"):
        cross_entropy(logits, labels, vocab_size=6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (cross_entropy, {}),
        (cross_entropy, {"vocab_size": 9, "z_loss": 0.1, "softcap": 3.0, "reduction": "none"}),
        (chunked_ce, {"vocab_size": 9, "label_smoothing": 0.1, "z_loss": 0.1}),
    ],
)
def test_compiled_does_not_recompile_for_other_lengths(
    loss_fn: Any, options: dict[str, Any]
) -> None:
    # One graph for the first length, one for all others; torch makes one more for 0 and for 1.
    lengths = 5, 7, 9, 64, 1, 0, 33, 0, 1, 2
    graphs = _check_lengths(lengths, loss_fn, lambda x: x, lambda x: x, **options)
    assert graphs == [1, 2, 2, 2, 3, 4, 4, 4, 4, 4]


@distributed(world_size=2, timeout=110)
def test_compiled_tp_does_not_recompile_for_other_lengths() -> None:
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    tp = init_device_mesh("cpu", (2,))
    graphs = _check_lengths(
        (5, 7, 9, 64),
        cross_entropy,
        lambda x: distribute_tensor(x, tp, [Shard(-1)]),
        lambda x: x.full_tensor(),
        vocab_size=9,
    )
    assert graphs == [1, 2, 2, 2]


def _check_lengths(
    lengths: Sequence[int],
    loss_fn: Any,
    shard: Callable[[Tensor], Tensor],
    whole: Callable[[Any], Tensor],
    **options: Any,
) -> list[int]:
    """The number of compiled graphs after each length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_fn, backend=counter, fullgraph=True)
    graphs = []
    for tokens in lengths:
        torch.manual_seed(tokens)
        full, labels = torch.randn(tokens, 10), torch.randint(9, (tokens,))
        labels[: tokens if tokens == 9 else 2] = -100  # once all of them
        want, want_grad = _grad(cross_entropy, full, labels, **options)
        leaf = shard(full).requires_grad_()
        loss = compiled(leaf, labels, **options)
        loss.sum().backward()
        torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(whole(leaf.grad), want_grad, atol=1e-6, rtol=1e-5)
        assert torch.equal(whole(leaf.detach()), full)  # not written to
        graphs.append(counter.frame_count)
    return graphs


@distributed(world_size=4)
def test_dtensor_logits_replicated_sharded_or_refused() -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, one = both["tp"], init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))["tp"]
    torch.manual_seed(0)
    full, labels = torch.randn(2, 3, 7), torch.tensor([[0, 6, -100], [4, 3, 1]])
    want, want_grad = _grad(cross_entropy, full, labels, label_smoothing=0.1, vocab_size=7)
    for placement in (Shard(-1), Shard(2), Replicate()):
        logits = distribute_tensor(full, tp, [placement]).requires_grad_()
        target = (
            distribute_tensor(labels, tp, [Replicate()]) if placement.is_replicate() else labels
        )
        loss = cross_entropy(logits, target, label_smoothing=0.1)
        assert type(loss) is Tensor
        loss.backward()
        assert isinstance(logits.grad, DTensor)
        assert logits.grad.placements == logits.placements
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(logits.grad.full_tensor(), want_grad, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(  # padded to 8 columns, of which the last rank has 3 real ones
        cross_entropy(
            distribute_tensor(F.pad(full, (0, 1), value=9.0), tp, [Shard(-1)]),
            labels,
            label_smoothing=0.1,
            vocab_size=7,
        ),
        want,
    )

    logits = distribute_tensor(full, one, [Shard(-1)])  # whole, whatever its placement says
    assert torch.equal(cross_entropy(logits, labels, label_smoothing=0.1), want)

    for grid, placements in (
        (tp, [Shard(0)]),
        (tp, [Shard(1)]),
        (tp, [Partial()]),
        (both, [Replicate(), Shard(-1)]),
    ):
        logits = DTensor.from_local(full, grid, placements, run_check=False)
        with pytest.raises(ValueError, match=r"placements .* takes Replicate\(\), or Shard\(-1\)"):
            cross_entropy(logits, labels)
    sharded = distribute_tensor(labels, tp, [Shard(0)])
    with pytest.raises(ValueError, match=r"labels are a DTensor .*Replicate\(\) first"):
        cross_entropy(distribute_tensor(full, tp, [Shard(-1)]), sharded)
    for bad in (7, -1):  # on both ranks of each tp group, so nobody waits
        with pytest.raises(ValueError, match=r"\[0, 7\)"):
            cross_entropy(distribute_tensor(full, tp, [Shard(-1)]), labels.clamp(max=-1) * 0 + bad)


def _grad(loss_fn, logits: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    leaf = logits.detach().clone().requires_grad_()
    loss = loss_fn(leaf, labels, **options)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad
