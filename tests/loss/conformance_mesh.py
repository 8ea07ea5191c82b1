"""Runs cells of the table on a mesh: a small model that ends in the loss, against float64 in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ptx
from loss import conformance
from loss.conformance_losses import CHUNKED, OF_LOGITS, of_hidden, of_logits
from loss.conformance_model import (
    autocast,
    build_mesh,
    classes_of,
    data,
    of_model,
    options_of,
    plain,
    upstream,
    wrapped,
)
from loss.conformance_table import Cell

# max|difference| / max|reference| of a tensor. Huge logits are off by the rounding of a float32
# matmul times 1000, which is what a probability then is off by.
EXACT = {"fp32": 1e-5, "fp64": 1e-12}
HUGE = {"fp32": 5e-3, "fp64": 1e-11}


# What the loss computes; other gradients went through a model that tensor parallelism rounds more often.
OF_LOSS = ("loss", "activations", "output.weight", "output.bias")


@dataclass
class Outcome:
    """Of a step: losses and activations' gradients by data rank, and every parameter's gradient."""

    losses: list[Tensor]
    activations: list[Tensor | None]
    gradients: dict[str, Tensor | None]


def run_cells(placement: str, cells: list[Cell]) -> list[str]:
    """What is wrong with these cells, each problem named; on every rank of a world."""
    mesh = build_mesh(placement)
    problems = []
    for cell in cells:
        try:
            found = check_cell(mesh, cell)
        except Exception as error:
            error.add_note(f"in the cell {placement}: {cell}")
            raise
        problems += [f"{placement}: {cell}: {problem}" for problem in found]
    return problems


def check_cell(mesh: DeviceMesh, cell: Cell) -> list[str]:
    ranks = ptx.data_mesh(mesh)
    model = wrapped(mesh, cell)
    got = _train(mesh, model, cell)
    want = reference(cell, ranks.size())
    eager = None if cell.dtype in EXACT else reference(cell, ranks.size(), eager=True)
    rank = ranks.get_local_rank()
    problems = []
    loss, activation = got.losses[0], got.activations[0]
    if loss.dtype != (torch.float64 if cell.dtype == "fp64" else torch.float32):
        problems.append(f"the loss is {loss.dtype}")
    pairs = {"loss": (loss, want.losses[rank], eager and eager.losses[rank])}
    pairs["activations"] = (
        activation,
        want.activations[rank],
        eager and eager.activations[rank],
    )
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        pairs[name] = got.gradients[name], gradient, eager and eager.gradients[name]
    for name, (mine, exact, rough) in pairs.items():
        if problem := _difference(mine, exact, rough, cell, name):
            problems.append(f"{name} {problem}")
    return problems


def reference(cell: Cell, ranks: int, *, eager: bool = False) -> Outcome:
    """All data ranks' batches in one process, in float64, or as eager computes the cell's dtype."""
    dtype = torch.float64 if not eager else torch.float32
    if eager and cell.dtype in ("bf16", "policy"):
        dtype = torch.bfloat16
    model = plain(of_model(cell)).to(dtype)
    losses, activations, total = [], [], torch.zeros(())
    for rank in range(ranks):
        tokens, labels, keep = data(cell, rank)
        with autocast(cell) if eager else nullcontext():
            hidden = model(tokens, return_hidden=True)
            if cell.calls == "frozen hidden":
                hidden = hidden.detach()
            logits = model.output(hidden)
        states = logits if cell.loss in OF_LOGITS else hidden
        if states.requires_grad:
            states.retain_grad()
        loss = conformance.reference(
            logits[keep], labels[keep], vocab_size=classes_of(cell), **options_of(cell)
        )
        losses.append(loss.detach())
        activations.append(states)
        total = total + (loss * upstream(cell, rank)).sum() / ranks
    if total.requires_grad:
        total.backward()
    return Outcome(
        losses,
        # A rank's own loss isn't divided by their number; FSDP averages.
        [None if a.grad is None else a.grad * ranks for a in activations],
        {name: p.grad for name, p in model.named_parameters()},
    )


def _train(mesh: DeviceMesh, model: ptx.Transformer, cell: Cell) -> Outcome:
    rank = ptx.data_mesh(mesh).get_local_rank()
    activations, losses = [], []
    call = loss_of if cell.calls != "compiled" else _compiled(cell, mesh)

    def total() -> Tensor:
        tokens, labels, keep = data(cell, rank)
        with autocast(cell):
            states = model(tokens, return_hidden=cell.loss not in OF_LOGITS)
            if cell.calls == "frozen hidden":
                states = states.detach()
            if states.requires_grad:
                states.retain_grad()
            loss = call(model, states[keep], labels[keep], mesh["tp"], cell)
        activations.append(states)
        losses.append(loss.detach())
        return (loss * upstream(cell, rank)).sum()

    _backward(model, cell, total)
    gradients = {name: _full(p.grad) for name, p in model.named_parameters()}
    if cell.calls == "written":
        _check_step(model, cell)
    model.zero_grad()  # now, as loops do: after a forward without backward FSDP shows copies
    grads = [_full(states.grad) for states in activations if states.grad is not None]
    return Outcome([losses[-1]], [sum(grads) if grads else None], gradients)


def _backward(model: ptx.Transformer, cell: Cell, total: Callable[[], Tensor]) -> None:
    """However often it is called, gradients come out as those of one forward and one backward."""
    if cell.calls == "two backwards":
        loss = total()
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
    elif cell.calls == "two forwards":
        first, second = total(), total()
        (0.25 * first + 0.75 * second).backward()
    elif cell.calls == "window":
        for share in (0.25, 0.75):
            with ptx.accumulate_grads(model, last=share == 0.75):
                (share * total()).backward()
    elif cell.calls == "dropped":  # a loss that is never sent backward leaves no trace
        total()
        assert all(p.grad is None for p in model.parameters())
        total().backward()
    elif cell.calls == "written":
        _scale(model.parameters(), 0.5)
        with torch.no_grad():
            total()
        _scale(model.parameters(), 2.0)  # lost, if these were gathered copies
        total().backward()
    else:
        total().backward()


@torch.no_grad()
def _scale(parameters: Iterable[Tensor], factor: float) -> None:
    for parameter in parameters:
        parameter.mul_(factor)


@torch.no_grad()
def _check_step(model: ptx.Transformer, cell: Cell) -> None:
    """An optimizer that is built now trains what the model reads; afterwards all is as before."""
    before = [p.detach().clone() for p in model.parameters()]
    for old, want in zip(before, plain(of_model(cell)).parameters()):
        assert torch.equal(_full(old).to(want.dtype), want), "a write was lost"
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for p, old in zip(model.parameters(), before):
        trained = _full(old - 0.5 * p.grad)
        assert (_full(p) - trained).abs().max() <= 2**-6 * trained.abs().max(), "not trained"
        p.copy_(old)


def loss_of(
    model: ptx.Transformer, states: Tensor, labels: Tensor, tp: DeviceMesh, cell: Cell
) -> Tensor:
    """The loss of hidden states or logits, laid out as the cell says."""
    shape = labels.shape
    if cell.layout == "2-D":
        states, labels = states.flatten(0, 1), labels.flatten()
    elif cell.layout == "strided":
        states = states.transpose(0, 1).contiguous().transpose(0, 1)
        labels = labels.t().contiguous().t()
    elif cell.layout == "Replicate()":
        if isinstance(states, DTensor):
            states = states.redistribute(placements=[Replicate()])
        else:
            states = DTensor.from_local(states, tp, [Replicate()], run_check=False)
    options = options_of(cell) | {"vocab_size": classes_of(cell)}
    if cell.loss in CHUNKED:
        options["chunk_tokens"] = cell.chunk
    if cell.loss in OF_LOGITS:
        loss = of_logits(cell.loss, states, labels, tp, **options)
    elif cell.group == "weight":
        weight, bias = model.output.weight, model.output.bias
        loss = of_hidden(cell.loss, states, weight, labels, bias=bias, **options)
    else:
        loss = of_hidden(cell.loss, states, model.output, labels, **options)
    assert loss.shape == (labels.shape if cell.reduction == "none" else ()), loss.shape
    return loss.reshape(shape) if cell.reduction == "none" else loss


def _compiled(cell: Cell, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """`loss_of` in one graph; if FSDP gathers a head, only what comes before the loss and after it."""
    gathers = ptx.fsdp_mesh(mesh).size() > 1 and cell.loss not in OF_LOGITS
    warnings.filterwarnings("ignore", message=".*should not be instantiated")  # torch's own
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, backend=counter, fullgraph=not gathers)

    # What `loss_of` does before and after is a graph each.
    around = cell.layout != "plain", cell.reduction == "none", cell.loss == "token_logprobs"
    graphs = sum(around) if gathers else 1

    def call(*args: Any) -> Tensor:
        loss: Tensor = compiled(*args)
        assert counter.frame_count <= graphs, counter.frame_count
        return loss

    return call


def _difference(
    got: Tensor | None, want: Tensor | None, eager: Tensor | None, cell: Cell, name: str
) -> str | None:
    """How a tensor is wrong, if it is: against the exact one, and for short dtypes against eager's error."""
    if got is None or want is None:
        return None if got is want else f"is {got}, not {want}"
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got = got.double()
    if not want.any():  # nothing is expected, so exactly nothing may come
        return f"is {got}, not 0" if got.any() else None
    if eager is None:
        limit = HUGE[cell.dtype] if cell.labels == "huge" else EXACT[cell.dtype]
        error = (got - want).abs().max() / want.abs().max()
    else:
        own = (eager.double() - want).norm() / want.norm()
        # Eager may have a few numbers right by luck. Over 24 seeds the root mean square of errors of a
        # bias of 3 is eager's (1.02 x, FSDP2 x tp 2), that of one seed 5.4 x.
        few = want.numel() < 8
        limit = (2 if name in OF_LOSS and not few else 3) * own
        limit += 2**-6 if name == "loss" or few else 2**-7
        error = (got - want).norm() / want.norm()
    return None if error <= limit else f"is off by {float(error):.1e} (limit {float(limit):.1e})"


def _full(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor if tensor is None else tensor.detach()
