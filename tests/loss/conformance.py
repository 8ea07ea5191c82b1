"""What every loss has to give: cases, and a check of one loss against a few lines of float64.

`conformance_losses` says how each loss is called. Here it is a callable
``loss(logits, labels, *, vocab_size, **options)`` on the *full* logits of one process, [..., P]
with P >= vocab_size. One that works on something else adapts: a rank of a tp group slices its
columns (and sums the gradient over ranks in ``gather``), a fused loss takes the logits as its hidden
states and the identity as its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

IGNORE = -100
DEFAULTS: dict[str, Any] = {
    "ignore_index": IGNORE,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
}
ENTROPY_WEIGHT = 0.3  # in a loss of log-probabilities and entropies
# Of the gradient, relative to its largest value; a bfloat16 one is rounded once (by up to 2**-9).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.1e-3}


@dataclass(frozen=True)
class Case:
    name: str
    logits: Tensor
    labels: Tensor
    vocab_size: int
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, V={self.vocab_size}, {self.logits.dtype}, {self.options}"


def reference(logits: Tensor, labels: Tensor, *, vocab_size: int, **given: Any) -> Tensor:
    """The loss of float64 logits; with ``entropy=True`` plus that of each token, weighted."""
    o = DEFAULTS | given
    x = logits.double()[..., :vocab_size] * o["logit_scale"]
    x = x if o["softcap"] is None else o["softcap"] * torch.tanh(x / o["softcap"])
    x = x / o.get("temperature", 1.0)
    lse, kept = torch.logsumexp(x, -1), labels != o["ignore_index"]
    log_p = x - lse[..., None]
    target = log_p.gather(-1, labels.long().masked_fill(~kept, 0)[..., None])[..., 0]
    loss = -(1 - o["label_smoothing"]) * target
    if o["label_smoothing"]:
        loss = loss - o["label_smoothing"] / vocab_size * log_p.sum(-1)
    if o.get("entropy"):
        loss = loss - ENTROPY_WEIGHT * (log_p.exp() * log_p).sum(-1)
    loss = (loss + o["z_loss"] * lse**2).masked_fill(~kept, 0.0)
    if o["reduction"] == "none":
        return loss
    return loss.sum() / (max(int(kept.sum()), 1) if o["reduction"] == "mean" else 1)


def check(
    loss_fn: Callable[..., Tensor],
    case: Case,
    gather: Callable[[Tensor], Tensor] = lambda g: g,
    *,
    roundings: int = 1,
) -> None:
    """Compare loss and gradient with `reference`, for several backwards through one graph.

    ``roundings``: how often a bfloat16 gradient may be rounded; several for a product of matmuls.
    """
    mine, full = (case.logits.detach().clone().requires_grad_() for _ in range(2))
    before = case.logits.clone()
    loss = loss_fn(mine, case.labels, vocab_size=case.vocab_size, **case.options)
    want = reference(full, case.labels, vocab_size=case.vocab_size, **case.options)
    dtype = torch.float64 if case.logits.dtype == torch.float64 else torch.float32
    assert loss.dtype == dtype, f"{case}: {loss}"
    assert loss.requires_grad, f"{case}: {loss}"
    assert loss.shape == want.shape, f"{case}: {loss.shape}"
    _assert_near(loss, want, 1e-12 if dtype == torch.float64 else 1e-6, f"{case}: loss")

    torch.manual_seed(1)
    upstream = torch.rand_like(loss) + 0.5
    (expected,) = torch.autograd.grad(want, full, upstream.double())
    tolerance = TOLERANCE[case.logits.dtype]
    if roundings > 1 and case.logits.dtype == torch.bfloat16:
        tolerance = roundings * 2**-8  # each by up to half a unit in the last of 8 places
    grads = [
        torch.autograd.grad(loss, mine, upstream * factor, retain_graph=True)[0]
        for factor in (1.0, 1.0, -64.0)
    ]
    assert all(g.dtype == case.logits.dtype for g in grads), case
    _assert_near(gather(grads[0]), expected, tolerance, f"{case}: gradient")
    assert torch.equal(grads[0], grads[1]), f"{case}: the second backward differs"
    _assert_near(gather(grads[2]), -64 * expected, tolerance, f"{case}: scaled gradient")
    assert torch.equal(mine, before), f"{case}: the logits were written to"
    with torch.no_grad():
        again = loss_fn(mine, case.labels, vocab_size=case.vocab_size, **case.options)
    assert torch.equal(again, loss), f"{case}: under no_grad"
    assert not again.requires_grad, f"{case}: under no_grad"


def cases(vocab_size: int, *, every_option: bool) -> Iterator[Case]:
    """Cases for one vocabulary: all combinations of options, or some, and every awkward input."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, vocab_size), _labels(2, 5, vocab_size)
    reductions = ("mean", "sum", "none")
    for reduction, smoothing, z, cap, scale in product(
        reductions, (0.0, 0.1), (0.0, 0.02), (None, 1.5), (1.0, 0.7)
    ):
        extra = {"label_smoothing": smoothing, "z_loss": z, "softcap": cap, "logit_scale": scale}
        options = {k: v for k, v in extra.items() if v != DEFAULTS[k]} | {"reduction": reduction}
        if every_option or len(options) in (1, 5):
            yield Case("ragged", logits, labels, vocab_size, options)

    everything = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 20.0, "logit_scale": 0.5}
    no_cap = everything | {"softcap": None}
    columns = torch.arange(vocab_size)
    padded = torch.cat([logits, torch.full((2, 5, 5), 30.0)], -1)  # columns that would win
    masked = logits.clone()
    masked[..., 1:] = -torch.inf  # whole shards without a finite logit
    several = ({}, everything, {"reduction": "sum"}, everything | {"reduction": "none"})
    for options in several if every_option else several[:2]:
        yield Case("all ignored", logits, torch.full((2, 5), IGNORE), vocab_size, options)
        yield Case("no tokens", logits[:, :0], labels[:, :0], vocab_size, options)
        yield Case("one token", logits[0, :1], labels[0, :1], vocab_size, options)
        yield Case("padded", padded, labels, vocab_size, options)
        yield Case(
            "every column", torch.randn(vocab_size, vocab_size), columns, vocab_size, options
        )
        yield Case("bf16", logits.bfloat16(), labels, vocab_size, options)
        yield Case("float64", logits.double(), labels, vocab_size, options)
    for options in ({}, no_cap):
        yield Case("huge", logits * 1000, labels, vocab_size, options)
        yield Case("far from 0", logits + 3e4, labels, vocab_size, options)
    yield Case("one logit per row", logits[0, 0], labels[0, 0], vocab_size)
    yield Case("int32", logits, labels.int(), vocab_size)
    yield Case("strided", logits.transpose(0, 1), labels.t(), vocab_size, everything)
    yield Case("class 0 ignored", logits, labels.clamp(min=0), vocab_size, {"ignore_index": 0})
    yield Case("masked columns", masked, labels.clamp(max=0), vocab_size)


def _labels(rows: int, columns: int, vocab_size: int) -> Tensor:
    labels = torch.randint(vocab_size, (rows, columns))
    labels[0, 0], labels[0, 1] = 0, vocab_size - 1
    labels[0, 2] = labels[-1, -1] = IGNORE
    return labels


def _assert_near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {got.shape} against {want.shape}"
    got, want = got.detach(), want.detach()
    if want.numel():
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
        # Where nothing is expected (all ignored), nothing at all may come.
        assert error <= tolerance, f"{what} is off by {float(error):.2e}: {got} against {want}"


def summed_over(tp: DeviceMesh) -> Callable[[Tensor], Tensor]:
    # A rank's gradient is 0 outside its columns, so the sum is all columns side by side.
    def gather(grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=tp.get_group())
        return total

    return gather
