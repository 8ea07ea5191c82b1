from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from loss import conformance
from loss.token_reference import OPTIONS, as_loss, cases, close, inputs, reference, upstreams
from ptx.loss import _column_stats as column_stats
from ptx.loss import fused_linear_ce, token_logprobs


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_conformance(chunk: int | None) -> None:
    for case in cases(10):
        conformance.check(as_loss(chunk), case, roundings=2)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "temperature", "capped"])
@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_every_gradient(
    options: dict[str, Any], chunk: int | None, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_stats, "CPU_BLOCK", 2 * 11)  # several blocks in a chunk
    hidden, weight, bias, labels = inputs()
    given = (hidden, weight, bias)[: 3 if with_bias else 2]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        for upstream in upstreams(labels):
            want, want_grads = reference(given, labels, upstream, vocab_size=11, **options)
            mine = [t.to(dtype).requires_grad_() for t in given]
            got = token_logprobs(
                *mine[:2],
                labels,
                bias=mine[2] if with_bias else None,
                vocab_size=11,
                chunk_tokens=chunk,
                entropy=True,
                **options,
            )
            grads = torch.autograd.grad(got, mine, [u.to(dtype) for u in upstream])
            for tensor, expected in zip((*got, *grads), (*want, *want_grads)):
                assert tensor.dtype == dtype
                close(tensor, expected, tolerance)
            assert torch.equal(grads[1][11:], torch.zeros(2, 5, dtype=dtype))
            assert all((t[labels == -100] == 0).all() for t in got)


def test_without_the_entropy_it_is_the_loss_of_each_token() -> None:
    hidden, weight, bias, labels = inputs()
    mine = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    losses = fused_linear_ce(*mine[:2], labels, bias=mine[2], reduction="none", chunk_tokens=3)
    logprobs = token_logprobs(*mine[:2], labels, bias=mine[2], chunk_tokens=3)
    both = token_logprobs(*mine[:2], labels, bias=mine[2], chunk_tokens=3, entropy=True)
    assert torch.equal(logprobs, -losses)
    assert torch.equal(logprobs, both[0])
    upstream = torch.rand_like(losses)
    for a, b in zip(
        torch.autograd.grad(losses, mine, -upstream), torch.autograd.grad(logprobs, mine, upstream)
    ):
        assert torch.equal(a, b)


def test_temperature_divides_last() -> None:
    hidden, weight, _, labels = inputs()
    scaled = token_logprobs(hidden, weight, labels, entropy=True, logit_scale=1 / 0.7)
    heated = token_logprobs(hidden, weight, labels, entropy=True, temperature=0.7)
    assert all(torch.equal(a, b) for a, b in zip(scaled, heated))
    # Cold enough, a capped distribution is still one over capped logits: 2 * 5 / T is the most.
    capped, _ = token_logprobs(
        1e3 * hidden, weight, labels, entropy=True, temperature=10.0, softcap=5.0
    )
    assert capped.min() >= -1.0 - math.log(13)


def test_masked_columns_and_distributions_at_the_ends() -> None:
    """p * log p is 0 where p is; a column without probability has no gradient, not NaN."""
    hidden, weight, bias, labels = inputs()
    masked = bias.clone()
    masked[8:] = -torch.inf  # columns that must not be sampled
    labels = labels.clamp(max=7)
    upstream = upstreams(labels)[-1]
    want, want_grads = reference((hidden, weight, bias), labels, upstream, vocab_size=8)
    mine = [t.clone().requires_grad_() for t in (hidden, weight, masked)]
    got = token_logprobs(*mine[:2], labels, bias=mine[2], entropy=True, chunk_tokens=3)
    grads = torch.autograd.grad(got, mine, upstream)
    for tensor, expected in zip((*got, *grads), (*want, *want_grads)):
        close(tensor, expected, 2e-6)

    zeros = torch.zeros(3, 4)
    _, uniform = token_logprobs(torch.ones(2, 4), zeros, torch.tensor([0, 2]), entropy=True)
    torch.testing.assert_close(uniform, torch.full((2,), math.log(3)))
    certain, none = token_logprobs(
        1e4 * torch.eye(3), torch.eye(3), torch.arange(3), entropy=True, chunk_tokens=2
    )
    assert torch.equal(certain, torch.zeros(3))
    assert torch.equal(none, torch.zeros(3))


def test_ppo_loss_and_kl_are_those_of_full_logits() -> None:
    torch.manual_seed(0)
    hidden, weight, _, labels = inputs()
    keep = (labels != -100).double()
    old, reference, advantage = (torch.randn(2, 7) for _ in range(3))

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        ratio = (logprobs - old).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        distance = (reference - logprobs).exp() - (reference - logprobs) - 1
        return (keep * (0.1 * distance - clipped - 0.01 * entropy)).sum() / keep.sum()

    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    log_p = (exact[0] @ exact[1].t()).log_softmax(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    want = loss(chosen, -(log_p.exp() * log_p).sum(-1))
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    got = loss(*token_logprobs(*mine, labels, entropy=True, chunk_tokens=4))
    close(got, want.detach(), 1e-6)
    for grad, expected in zip(torch.autograd.grad(got, mine), torch.autograd.grad(want, exact)):
        close(grad, expected, 2e-6)


def test_nothing_to_compute_and_one_output_used() -> None:
    hidden, weight, _, labels = inputs()
    for target, states in ((labels * 0 - 100, hidden), (labels[:, :0], hidden[:, :0])):
        mine = [t.clone().requires_grad_() for t in (states, weight)]
        for entropy in (False, True):
            results = token_logprobs(*mine, target, entropy=entropy)
            for result in results if isinstance(results, tuple) else (results,):
                assert torch.equal(result, torch.zeros_like(result))
                for grad in torch.autograd.grad(result.sum(), mine, retain_graph=True):
                    assert torch.equal(grad, torch.zeros_like(grad))
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    for used in (0, 1):
        upstream = [torch.zeros(2, 7), torch.zeros(2, 7)]
        upstream[used] += 1
        _, want = reference((hidden, weight), labels, upstream)
        out = token_logprobs(*mine, labels, entropy=True)[used]
        for _ in range(2):  # and two backwards
            for grad, expected in zip(
                torch.autograd.grad(out.sum(), mine, retain_graph=True), want
            ):
                close(grad, expected, 2e-6)


def test_frozen_sides_and_no_grad() -> None:
    hidden, weight, _, labels = inputs()
    upstream = upstreams(labels)[-1]
    want, want_grads = reference((hidden, weight), labels, upstream)
    for frozen in (0, 1):
        mine = [hidden.clone(), weight.clone()]
        mine[1 - frozen].requires_grad_()
        got = token_logprobs(*mine, labels, entropy=True, chunk_tokens=4)
        torch.autograd.backward(got, upstream)
        assert mine[frozen].grad is None
        close(mine[1 - frozen].grad, want_grads[1 - frozen], 2e-6)
    with torch.no_grad():
        got = token_logprobs(hidden, weight.requires_grad_(), labels, entropy=True)
    assert not any(t.requires_grad for t in got)
    close(got[1], want[1], 1e-6)


def test_later_writes_to_the_labels_raise() -> None:
    hidden, weight = torch.randn(4, 5, requires_grad=True), torch.randn(7, 5)
    labels = torch.arange(4)
    logprobs = token_logprobs(hidden, weight, labels)
    labels += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_bf16_errors_are_eagers() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 64).bfloat16(), (0.125 * torch.randn(900, 64)).bfloat16()
    labels = torch.randint(900, (512,))
    upstream = [torch.rand(512) + 0.5, 0.1 * torch.rand(512)]
    want, want_grads = reference((hidden, weight), labels, upstream)

    def eager(states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (states @ head.t()).float().log_softmax(-1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def errors(loss_fn: Any) -> list[float]:
        mine = [t.clone().requires_grad_() for t in (hidden, weight)]
        got = loss_fn(*mine)
        assert all(t.dtype == torch.float32 for t in got)
        grads = torch.autograd.grad(got, mine, upstream)
        expected = (*want, *want_grads)
        pairs = zip((*got, *grads), expected)
        return [float((g.detach().double() - e).norm() / e.norm()) for g, e in pairs]

    limits = [1.1 * error for error in errors(eager)]
    for chunk in (512, 64):
        mine = errors(
            lambda h, w, c=chunk: token_logprobs(h, w, labels, entropy=True, chunk_tokens=c)
        )
        assert all(error <= limit for error, limit in zip(mine, limits)), (chunk, mine, limits)
    with torch.autocast("cpu", torch.bfloat16):
        short = token_logprobs(hidden.float(), weight.float(), labels)
    assert torch.equal(short, token_logprobs(hidden, weight, labels))


def test_matmuls_memory_and_shapes_that_depend_on_data() -> None:
    width, vocab_size, chunk = 8, 300, 16
    hidden = torch.randn(8 * chunk, width, requires_grad=True)
    weight = torch.randn(vocab_size, width, requires_grad=True)
    labels = torch.randint(vocab_size, (8 * chunk,))
    with _Shapes() as seen, FlopCounterMode(display=False) as counter:
        logprobs, entropy = token_logprobs(
            hidden, weight, labels, entropy=True, chunk_tokens=chunk, softcap=9.0
        )
        (logprobs + entropy).sum().backward()
    largest = max(math.prod(shape) for shape in seen.shapes if shape != weight.shape)
    assert largest == chunk * vocab_size
    assert counter.get_total_flops() == 4 * 2 * hidden.numel() * vocab_size
    with FakeTensorMode():
        fake = torch.empty(2, 7, 8, requires_grad=True)
        head = torch.empty(40, 8, requires_grad=True)
        out = token_logprobs(fake, head, torch.empty(2, 7, dtype=torch.int64), entropy=True)
        assert out[1].shape == (2, 7)
        sum(out).sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("entropy", [False, True])
def test_compiled_caller_is_one_graph(entropy: bool) -> None:
    hidden, weight, _, labels = inputs()

    def step(states: Tensor, head: Tensor) -> Tensor:
        out = token_logprobs(states, head, labels, entropy=entropy, chunk_tokens=5)
        return (out[0] + 0.1 * out[1]).sum() if entropy else out.exp().sum()  # type: ignore[union-attr]

    torch._dynamo.reset()
    results = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        mine = [t.clone().requires_grad_() for t in (hidden, weight)]
        value = call(*mine)
        results.append((value.detach(), *torch.autograd.grad(value, mine)))
    for eager, compiled in zip(*results):
        close(compiled, eager.double(), 2e-6)


def test_wrong_arguments() -> None:
    hidden, weight, _, labels = inputs()
    for bad in (0, -1.0, math.inf, math.nan, torch.ones(())):
        with pytest.raises(ValueError, match=r"token_logprobs: softcap=-1 .*temperature=.* must"):
            token_logprobs(hidden, weight, labels, temperature=bad, softcap=-1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"token_logprobs: .*vocab_size=14 .*chunk_tokens=0"):
        token_logprobs(hidden, weight, labels, vocab_size=14, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"token_logprobs: labels \(2, 6\) must match .*; shift"):
        token_logprobs(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match=r"token_logprobs: .*\[0, 10\).* the first is 10"):
        token_logprobs(hidden, weight, labels, vocab_size=10)
    with pytest.raises(ValueError, match=r"token_logprobs: .*forward other than nn\.Linear's"):
        token_logprobs(hidden, nn.Sequential(nn.Linear(5, 13)), labels)


class _Shapes(TorchDispatchMode):
    """The shapes of all tensors that come out of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.shapes.add(out.shape)
        return out
