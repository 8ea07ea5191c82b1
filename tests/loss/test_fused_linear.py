from __future__ import annotations

import copy
import math
import warnings
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from collectives import CollectiveLog
from harness import distributed
from loss import conformance
from ptx.loss import _column_stats as column_stats
from ptx.loss import fused_linear_ce
from ptx.loss._head_task import default_chunk

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7}


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_conformance(chunk: int | None) -> None:
    for vocab_size in (10, 3):
        every = vocab_size == 10 and chunk != 1
        for case in conformance.cases(vocab_size, every_option=every):
            if case.name != "masked columns":  # -inf, which no finite hidden state can give
                conformance.check(_identity_head(chunk), case, roundings=2)


@pytest.mark.parametrize("block", [1, 50])  # elements: one row at a time; an uneven number of rows
def test_result_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(column_stats, "CPU_BLOCK", block)
    for case in conformance.cases(7, every_option=False):
        if case.name != "masked columns":
            conformance.check(_identity_head(4), case, roundings=2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_gradient(
    reduction: str, extra: dict[str, Any], chunk: int | None, with_bias: bool
) -> None:
    hidden, weight, bias, labels = _inputs()
    options = {"reduction": reduction, "vocab_size": 11, **extra}
    mine = [t.clone().requires_grad_() for t in (hidden, weight, bias)[: 3 if with_bias else 2]]
    loss = fused_linear_ce(
        *mine[:2], labels, bias=mine[2] if with_bias else None, chunk_tokens=chunk, **options
    )
    upstream = torch.linspace(0.5, 2.0, loss.numel()).reshape(loss.shape)
    loss.backward(upstream)
    want, grads = _reference([hidden, weight, bias][: len(mine)], labels, upstream, **options)
    _close(loss, want)
    for tensor, grad in zip(mine, grads):
        _close(tensor.grad, grad)
    assert torch.equal(mine[1].grad[11:], torch.zeros(2, 5))


def test_module_is_its_weight_and_bias() -> None:
    hidden, weight, bias, labels = _inputs()
    for with_bias in (False, True):
        head = nn.Linear(5, 13, bias=with_bias)
        head.weight.data.copy_(weight)
        if with_bias:
            head.bias.data.copy_(bias)
        got = fused_linear_ce(hidden, head, labels)
        got.backward()
        mine = weight.clone().requires_grad_()
        want = fused_linear_ce(hidden, mine, labels, bias=bias if with_bias else None)
        want.backward()
        assert torch.equal(got, want)
        assert torch.equal(head.weight.grad, mine.grad)


def test_M11_padded_rows_get_no_probability_and_no_gradient() -> None:
    weight = torch.zeros(8, 4, requires_grad=True)
    loss = fused_linear_ce(torch.ones(3, 4), weight, torch.tensor([0, 5, -100]), vocab_size=6)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(6), abs=1e-6)
    assert torch.equal(weight.grad[6:], torch.zeros(2, 4))
    assert (weight.grad[:6] != 0).all()


def test_no_kept_label_gives_zero_loss_and_gradients() -> None:
    hidden, weight, bias, labels = _inputs()
    for target, states in ((labels * 0 - 100, hidden), (labels[:, :0], hidden[:, :0])):
        for reduction in ("mean", "sum", "none"):
            mine = [t.clone().requires_grad_() for t in (states, weight, bias)]
            loss = fused_linear_ce(*mine[:2], target, bias=mine[2], reduction=reduction)
            loss.sum().backward()
            assert torch.equal(loss, torch.zeros_like(loss))
            for tensor in mine:
                assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_forwards_and_backwards_in_any_order() -> None:
    hidden, weight, _, labels = _inputs()
    _, (want_hidden, want_weight) = _reference([hidden, weight], labels, torch.ones(()))
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    first = fused_linear_ce(*mine, labels, chunk_tokens=3)
    second = fused_linear_ce(*mine, labels, chunk_tokens=3)
    assert mine[0].grad is None  # a loss that is never sent backward leaves no trace
    assert mine[1].grad is None
    (3 * first - second).backward(retain_graph=True)
    _close(mine[0].grad, 2 * want_hidden)
    _close(mine[1].grad, 2 * want_weight)
    (0.5 * first + second).backward()
    _close(mine[0].grad, 3.5 * want_hidden)
    _close(mine[1].grad, 3.5 * want_weight)


def test_later_writes_to_the_inputs() -> None:
    hidden, weight, _, labels = _inputs()
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    with torch.no_grad():
        assert not fused_linear_ce(*mine, labels).requires_grad
        mine[1].mul_(2)
    loss = fused_linear_ce(*mine, labels)
    want, grads = _reference([hidden, weight * 2], labels, torch.ones(()))
    loss.backward(retain_graph=True)
    _close(loss, want)
    _close(mine[1].grad, grads[1])
    with torch.no_grad():
        mine[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # starts anew, from what is no longer there


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_later_writes_to_the_labels(reduction: str) -> None:
    """A buffer that the next batch was copied into used to give gradients of the wrong labels."""
    hidden, weight, _, labels = _inputs()
    for ignored in (False, True):  # the rows that are kept are a copy
        buffer = labels.clamp(min=0)
        buffer[0, 0] = -100 if ignored else 0
        mine = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = fused_linear_ce(*mine, buffer, reduction=reduction).sum()
        want = torch.autograd.grad(loss, mine, retain_graph=True)
        buffer.copy_((buffer + 1).clamp(min=0) % 13)
        if ignored:
            for got, expected in zip(torch.autograd.grad(loss, mine), want):
                torch.testing.assert_close(got, expected)
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, mine)


def test_L09_bf16_error_is_eagers_for_any_number_of_chunks() -> None:
    """L09."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 64).bfloat16()
    weight = (0.125 * torch.randn(1000, 64)).bfloat16()
    labels = torch.randint(1000, (1024,))
    labels[::10] = -100
    want, grads = _reference([hidden, weight], labels, torch.ones(()))

    def errors(loss_fn: Any, factor: float) -> list[float]:
        mine = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = loss_fn(*mine)
        (loss * factor).backward()
        assert loss.dtype == torch.float32
        assert abs(loss.item() / want.item() - 1) < 2e-5
        return [_relative(t.grad, factor * grad) for t, grad in zip(mine, grads)]

    for factor in (1.0, 0.7):
        eager = errors(lambda h, w: F.cross_entropy((h @ w.t()).float(), labels), factor)
        one = errors(lambda h, w: fused_linear_ce(h, w, labels, chunk_tokens=1024), factor)
        for chunk in (512, 64, 8):
            many = errors(
                lambda h, w, c=chunk: fused_linear_ce(h, w, labels, chunk_tokens=c), factor
            )
            assert many[0] == pytest.approx(one[0], rel=0.02)
            assert many[1] <= 1.02 * one[1], (chunk, many, one)
            assert many[1] <= 1.1 * eager[1], (chunk, many, eager)
            # The hidden state's is rounded a second time by a factor that is known afterwards.
            limit = 1.1 * eager[0] if factor == 1.0 else 2.6e-3
            assert many[0] <= limit, (chunk, many, eager)


@pytest.mark.parametrize("chunk", [None, 4])
def test_autocast_computes_in_bf16_and_returns_float32(chunk: int | None) -> None:
    hidden, weight, bias, labels = _inputs()
    mine = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_linear_ce(*mine[:2], labels, bias=mine[2], chunk_tokens=chunk)
    loss.backward()
    rounded = [t.bfloat16() for t in (hidden, weight, bias)]
    want, grads = _reference(rounded, labels, torch.ones(()))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=5e-3)
    for tensor, grad in zip(mine, grads):
        assert tensor.grad.dtype == torch.float32
        assert _relative(tensor.grad, grad) < 1e-2


def test_matmuls_are_three_two_or_one_and_of_kept_rows_only() -> None:
    hidden, weight = torch.randn(32, 8), torch.randn(40, 8)
    labels = torch.randint(40, (32,))
    half = labels.clone()
    half[::2] = -100
    unit = 2 * 32 * 8 * 40

    def flops(labels: Tensor, h: bool, w: bool, **options: Any) -> float:
        mine = hidden.clone().requires_grad_(h), weight.clone().requires_grad_(w)
        with FlopCounterMode(display=False) as counter:
            loss = fused_linear_ce(*mine, labels, chunk_tokens=5, **options)
            if loss.requires_grad:
                loss.sum().backward()
        return counter.get_total_flops() / unit

    assert flops(labels, True, True) == 3
    assert flops(labels, True, False) == flops(labels, False, True) == 2
    assert flops(labels, False, False) == 1
    assert flops(half, True, True) == 1.5
    assert flops(labels, True, True, reduction="none") == 4
    with torch.no_grad():
        assert flops(labels, True, True) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reduction: str
) -> None:
    width, vocab_size, chunk = 8, 300, 16
    monkeypatch.setattr(column_stats, "CPU_BLOCK", 4 * vocab_size)
    hidden = torch.randn(8 * chunk, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab_size, (8 * chunk,))
    with _Shapes() as seen:
        loss = fused_linear_ce(hidden, weight, labels, chunk_tokens=chunk, reduction=reduction)
        torch.autograd.grad(loss.sum(), (hidden, weight))
    largest = max(math.prod(shape) for shape in seen.shapes if shape != weight.shape)
    assert largest == chunk * vocab_size
    # The weight, its gradient, and for bf16 a sum in float32.
    assert len(seen.allocated(weight.shape)) == (2 if dtype == torch.float32 else 3)


def test_default_chunk_fits_the_weight() -> None:
    assert default_chunk(2048, 1024) == 1024
    assert default_chunk(2048, 256) == 256
    assert default_chunk(1100, 1024) == 560  # two of like size, not 1024 and 76
    assert default_chunk(100, 1024) == 112
    assert default_chunk(2048, 1024, ranks=2) == 2048
    assert default_chunk(0, 64) == 1


def test_fake_tensors_see_no_shape_that_depends_on_data() -> None:
    with FakeTensorMode():
        hidden = torch.empty(2, 7, 8, requires_grad=True)
        weight = torch.empty(40, 8, requires_grad=True)
        labels = torch.empty(2, 7, dtype=torch.int64)
        for reduction in ("mean", "none"):
            loss = fused_linear_ce(hidden, weight, labels, chunk_tokens=4, reduction=reduction)
            loss.sum().backward()
            assert hidden.grad.shape == hidden.shape
            assert weight.grad.shape == weight.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("as_module", [False, True])
def test_compiled_caller_is_one_graph(as_module: bool) -> None:
    hidden, weight, bias, labels = _inputs()
    linear = nn.Linear(5, 13)
    linear.load_state_dict({"weight": weight, "bias": bias})
    given = {} if as_module else {"bias": linear.bias}

    def step(states: Tensor) -> Tensor:
        head = linear if as_module else linear.weight
        return 2 * fused_linear_ce(states, head, labels, chunk_tokens=5, **given, **EVERYTHING)

    torch._dynamo.reset()
    results = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        states = hidden.clone().requires_grad_()
        loss = call(states)
        results.append((loss, *torch.autograd.grad(loss, (states, *linear.parameters()))))
    for eager, compiled in zip(*results):
        _close(compiled, eager.detach().double())


@distributed(world_size=2, timeout=110)
def test_compiled_caller_is_one_graph_under_tp() -> None:
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    tp = init_device_mesh("cpu", (2,))
    hidden, weight, _, labels = _inputs()
    hidden, labels = hidden[:, :6], labels[:, :6]
    head = nn.Parameter(distribute_tensor(weight, tp, [Shard(0)]))
    states = distribute_tensor(hidden.contiguous(), tp, [Shard(1)]).requires_grad_()

    def step(states: Tensor) -> Tensor:
        return 2 * fused_linear_ce(states, head, labels, chunk_tokens=5)

    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(states)
    loss.backward()
    want, grads = _reference([hidden, weight], labels, torch.tensor(2.0))
    _close(loss, 2 * want)
    _close(states.grad.full_tensor(), grads[0])
    _close(head.grad.full_tensor(), grads[1])


def test_rows_kept_though_ignored_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerators do, where dropping rows would need a sync."""
    monkeypatch.setattr("ptx.loss._head_inputs.can_read", lambda _: False)
    for case in conformance.cases(7, every_option=False):
        if case.name != "masked columns":
            conformance.check(_identity_head(4), case, roundings=2)


def test_wrong_arguments() -> None:
    hidden, weight, bias, labels = _inputs()
    with pytest.raises(ValueError, match=r"\[\.\.\., H\] and \[V, H\]"):
        fused_linear_ce(hidden[..., :4], weight, labels)
    with pytest.raises(
        ValueError, match=r"bias \(4,\) must be \[V\].*vocab_size=14 .*chunk_tokens=0"
    ):
        fused_linear_ce(hidden, weight, labels, bias=bias[:4], vocab_size=14, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16, the head torch\.float32"):
        fused_linear_ce(hidden.bfloat16(), weight, labels)
    with pytest.raises(ValueError, match=r"fused_linear_ce: labels \(2, 6\) must match"):
        fused_linear_ce(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match=r"\[0, 10\).* the first is 10"):
        fused_linear_ce(hidden, weight, labels, vocab_size=10)
    with pytest.raises(ValueError, match="fused_linear_ce: reduction='avg'"):
        fused_linear_ce(hidden, weight, labels, reduction="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a weight"):
        fused_linear_ce(hidden, "head", labels)  # type: ignore[arg-type]


def test_a_module_that_computes_something_else_is_refused() -> None:
    hidden, _, bias, labels = _inputs()
    linear = nn.Linear(5, 13)
    with pytest.raises(ValueError, match="bias was given beside a module"):
        fused_linear_ce(hidden, linear, labels, bias=bias)

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    replaced, wrapped = copy.deepcopy(linear), copy.deepcopy(linear)
    replaced.forward = partial(linear.forward)  # type: ignore[method-assign]
    wrapped.forward = wraps(linear.forward)(lambda x: 2 * linear(x))  # type: ignore[method-assign]
    for other in (Scaled(5, 13), nn.Sequential(linear), replaced, wrapped):
        with pytest.raises(ValueError, match=r"a forward other than nn\.Linear's"):
            fused_linear_ce(hidden, other, labels)

    def watch(*_: Any) -> None:
        return None

    for register in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hooked = copy.deepcopy(linear)
        handle = getattr(hooked, f"register_{register}_hook")(watch)
        with pytest.raises(ValueError, match=r"hooks \[.*watch"):
            fused_linear_ce(hidden, hooked, labels)
        handle.remove()
        fused_linear_ce(hidden, hooked, labels)


@distributed(world_size=2)
def test_conformance_on_two_tp_ranks() -> None:
    tp = init_device_mesh("cpu", (2,))
    for chunk in (None, 3):
        for case in conformance.cases(7, every_option=chunk is None):
            if case.name != "masked columns":
                conformance.check(_identity_head(chunk, tp), case, roundings=2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@distributed(world_size=4)
def test_L12_tp_is_one_process(reduction: str) -> None:
    """L12: the hidden state's gradient is summed over tp, once; L15's tp half."""
    tp = init_device_mesh("cpu", (4,))
    for rows, extra in ((13, {}), (12, EVERYTHING), (3, {}), (13, EVERYTHING | {"vocab_size": 5})):
        hidden, weight, bias, labels = _inputs()
        hidden, labels = (
            torch.cat([hidden, hidden[:, :1]], 1),
            torch.cat([labels, labels[:, :1]], 1),
        )
        weight, bias = weight[:rows], bias[:rows]
        labels = labels.clamp(max=extra.get("vocab_size", rows) - 1)
        options = extra | {"reduction": reduction}
        upstream = torch.linspace(0.5, 2.0, 16 if reduction == "none" else 1)
        upstream = upstream.reshape(labels.shape if reduction == "none" else ())
        want, grads = _reference([hidden, weight, bias], labels, upstream, **options)
        for chunk, layout in ((None, None), (3, Replicate()), (3, Shard(1)), (None, Shard(1))):
            head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
            own = distribute_tensor(bias, tp, [Shard(0)]).requires_grad_()
            states = hidden.clone()
            if layout is not None:
                states = distribute_tensor(states, tp, [layout])
            states.requires_grad_()
            with CollectiveLog() as forward:
                loss = fused_linear_ce(
                    states, head, labels, bias=own, chunk_tokens=chunk, **options
                )
            with CollectiveLog() as backward:
                loss.backward(upstream)
            _close(loss, want)
            everyone = [torch.empty_like(loss) for _ in range(4)]
            dist.all_gather(everyone, loss.detach())
            assert all(torch.equal(loss, other) for other in everyone)
            for tensor, grad in zip((states, head, own), grads):
                assert tensor.grad is not None
                whole = tensor.grad
                if isinstance(whole, DTensor):
                    assert whole.placements == tensor.placements
                    whole = whole.full_tensor()
                _close(whole, grad)
            # One exchange of three or four float32 per label and rank, one way for dH to leave.
            kept = int((labels != -100).sum())
            kinds = 4 if extra else 3
            split = layout == Shard(1)
            assert forward.calls["allgather_", 4 * kinds * kept] == 1, forward.calls
            assert forward.count() == 1 + split, forward.calls
            assert backward.count("reduce_scatter") == split, backward.calls
            assert backward.count("allreduce") == (not split), backward.calls
            assert backward.count() == 1, backward.calls


@distributed(world_size=2)
def test_L07_bad_label_raises_on_every_tp_rank_before_any_collective() -> None:
    tp = init_device_mesh("cpu", (2,))
    hidden, weight, _, labels = _inputs()
    head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
    wrong = labels.clone()
    wrong[1, 1] = 13
    with CollectiveLog() as seen, pytest.raises(ValueError, match="the first is 13"):
        fused_linear_ce(hidden, head, wrong)
    assert not seen.count()
    want, _ = _reference([hidden, weight], labels, torch.ones(()))
    _close(fused_linear_ce(hidden, head, labels), want)  # nobody was left in a collective


@distributed(world_size=2)
def test_tp_all_ignored_bf16_and_two_backwards() -> None:
    tp = init_device_mesh("cpu", (2,))
    hidden, weight, _, labels = _inputs()
    head = distribute_tensor(weight, tp, [Shard(0)]).requires_grad_()
    states = hidden.clone().requires_grad_()
    loss = fused_linear_ce(states, head, labels * 0 - 100)
    loss.backward()
    assert loss == 0
    assert torch.equal(states.grad, torch.zeros_like(states))
    assert torch.equal(head.grad.full_tensor(), torch.zeros_like(weight))

    _, (want_hidden, want_weight) = _reference([hidden, weight], labels, torch.ones(()))
    for chunk in (None, 3):
        states.grad = head.grad = None
        loss = fused_linear_ce(states, head, labels, chunk_tokens=chunk)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        _close(states.grad, 3 * want_hidden)
        _close(head.grad.full_tensor(), 3 * want_weight)

        short = [t.detach().bfloat16().requires_grad_() for t in (states, head)]
        fused_linear_ce(*short, labels, chunk_tokens=chunk).backward()
        assert _relative(short[0].grad, want_hidden) < 1e-2
        assert _relative(short[1].grad.full_tensor(), want_weight) < 1e-2


@distributed(world_size=2)
def test_tp_matmuls_and_largest_tensor() -> None:
    tp = init_device_mesh("cpu", (2,))
    width, vocab_size, chunk, tokens = 8, 300, 16, 128
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(vocab_size, width), tp, [Shard(0)]).requires_grad_()
    hidden, labels = torch.randn(tokens, width), torch.randint(vocab_size, (tokens,))
    unit = 2 * tokens * width * vocab_size // 2
    # One exchange of all rows' statistics has to come before the first gradient.
    for rows, matmuls in ((None, 3), (chunk, 4)):
        states = hidden.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter, _Shapes() as seen:
            fused_linear_ce(states, weight, labels, chunk_tokens=rows).backward()
        assert counter.get_total_flops() == matmuls * unit
        whole = {weight.shape, weight.to_local().shape}
        largest = max(math.prod(shape) for shape in seen.shapes if shape not in whole)
        assert largest == (rows or tokens) * vocab_size // 2


@distributed(world_size=4)
def test_wrong_dtensors() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = grid["tp"], grid["dp"]
    hidden, weight, bias, labels = _inputs()
    head = distribute_tensor(weight, tp, [Shard(0)])
    with pytest.raises(ValueError, match="bias and weight must be split over the same mesh"):
        fused_linear_ce(hidden, head, labels, bias=bias)
    with pytest.raises(ValueError, match=r"weight is a DTensor with placements .*Shard\(dim=1\)"):
        fused_linear_ce(hidden, distribute_tensor(weight, tp, [Shard(1)]), labels)
    with pytest.raises(ValueError, match="on a 2-D mesh"):
        fused_linear_ce(hidden, distribute_tensor(weight, grid, [Shard(0), Shard(0)]), labels)
    with pytest.raises(ValueError, match=r"hidden is a DTensor with placements .*Shard\(dim=2\)"):
        fused_linear_ce(distribute_tensor(hidden, tp, [Shard(2)]), head, labels)
    with pytest.raises(ValueError, match="they must be on the same tp mesh"):
        fused_linear_ce(distribute_tensor(hidden, dp, [Replicate()]), head, labels)
    # A head that every rank has in full, beside a hidden state that is split.
    whole = distribute_tensor(weight, tp, [Replicate()]).requires_grad_()
    states = distribute_tensor(hidden, tp, [Shard(0)]).requires_grad_()
    fused_linear_ce(states, whole, labels).backward()
    _, grads = _reference([hidden, weight], labels, torch.ones(()))
    _close(states.grad.full_tensor(), grads[0])
    _close(whole.grad.full_tensor(), grads[1])


def _identity_head(chunk: int | None, tp: DeviceMesh | None = None) -> Any:
    """The loss as `conformance` calls it: hidden states that are the logits."""

    def loss(logits: Tensor, labels: Tensor, *, vocab_size: int, **options: Any) -> Tensor:
        head = torch.eye(logits.shape[-1], dtype=logits.dtype)
        if tp is not None:
            head = distribute_tensor(head, tp, [Shard(0)])
        return fused_linear_ce(
            logits, head, labels, vocab_size=vocab_size, chunk_tokens=chunk, **options
        )

    return loss


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden [2, 7, 5] that isn't contiguous, weight [13, 5], bias, labels with two ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 2, 5).transpose(0, 1)
    labels = torch.randint(11, (2, 7))
    labels[0, 0], labels[0, 1], labels[1, 2] = 0, 10, 10
    labels[0, 2] = labels[1, 6] = -100
    return hidden, torch.randn(13, 5), torch.randn(13), labels


def _reference(
    tensors: list[Tensor], labels: Tensor, upstream: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of hidden, weight and perhaps bias, in float64 on one process."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    options.setdefault("vocab_size", tensors[1].shape[0])
    loss = conformance.reference(F.linear(*exact), labels, **options)
    return loss.detach(), list(torch.autograd.grad(loss, exact, upstream.double()))


def _close(got: Tensor | None, want: Tensor, tolerance: float = 1e-6) -> None:
    assert got is not None
    assert got.shape == want.shape
    error = (got.detach().double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"off by {float(error):.2e}"


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


class _Shapes(TorchDispatchMode):
    """The shapes of all tensors that come out of an op, and the storages behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.storages: dict[int, torch.Size] = {}
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its own dispatch comes first; we then see what it does locally
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if type(out) in (Tensor, nn.Parameter) else []:
            self.shapes.add(tensor.shape)
            self.alive.append(tensor)
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            if size == tensor.numel():
                self.storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.shape)
        return out

    def allocated(self, shape: torch.Size) -> list[int]:
        return [at for at, of in self.storages.items() if of == shape]
