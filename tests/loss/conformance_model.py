"""What cells of the table run on: a small model for each, its batch, and the options of the loss."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ptx
from loss.conformance_table import OPTIONS, PLACEMENTS, VOCABULARIES, Cell

ARGS = ptx.ModelArgs(dim=16, n_layers=1, n_heads=4, n_kv_heads=4, vocab_size=13, max_seq_len=16)
BATCH, SEQ = 2, 8
WHOLE = slice(None), slice(None)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build_mesh(placement: str) -> DeviceMesh:
    # torch's, of any linear layer with a bias that is an FSDP module.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return ptx.build_mesh(**PLACEMENTS[placement], device_type="cpu")


def of_model(cell: Cell) -> Cell:
    """What is left of a cell for the model that it runs on; equal ones share it."""
    calls = cell.calls if "frozen" in cell.calls and cell.calls != "frozen hidden" else "once"
    dtype = "fp32" if cell.dtype == "autocast" else cell.dtype
    layout = "Shard(1)" if cell.layout == "Shard(1)" else "plain"
    return Cell(
        group=cell.group,
        dtype=dtype,
        vocabulary=cell.vocabulary,
        bias=cell.bias,
        layout=layout,
        calls=calls,
    )


def plain(cell: Cell) -> ptx.Transformer:
    torch.manual_seed(0)
    rows, _ = VOCABULARIES[cell.vocabulary]
    model = ptx.Transformer(replace(ARGS, vocab_size=rows))
    model.output = nn.Linear(ARGS.dim, rows, bias=cell.bias)
    if "tied" in cell.group:
        model.output.weight = model.tok_embeddings.weight
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # else the loss is ln V
            p.copy_(p.bfloat16())  # the same weights for every dtype
    for name, p in model.named_parameters():
        frozen = name == "output.weight" if cell.calls == "frozen weight" else "output" not in name
        p.requires_grad_(not frozen or "frozen" not in cell.calls)
    return model


def wrapped(mesh: DeviceMesh, cell: Cell) -> ptx.Transformer:
    """The cell's model, as it was left by the last cell with the same one."""
    return _wrapped(mesh, of_model(cell))


@functools.cache
def _wrapped(mesh: DeviceMesh, cell: Cell) -> ptx.Transformer:
    model = plain(cell)
    if cell.dtype in ("bf16", "fp64"):
        model.to(torch.bfloat16 if cell.dtype == "bf16" else torch.float64)
    plan = ptx.tp_plan(model, sequence_parallel=cell.layout == "Shard(1)")
    ptx.apply_tp(model, mesh["tp"], plan)
    dp = ptx.fsdp_mesh(mesh)
    if dp.size() == 1:
        return model
    policy = POLICY if cell.dtype == "policy" else MixedPrecisionPolicy()
    if "root" in cell.group:  # by hand; apply_fsdp2 gives the head a group of its own
        fully_shard(model.layers["0"], mesh=dp, mp_policy=policy)
        return fully_shard(model, mesh=dp, mp_policy=policy)
    units = {
        "alone": None,
        "with norm": ["layers.*", ["norm", "output"]],
        "tied with norm": ["layers.*", ["tok_embeddings", "norm", "output"]],
    }[cell.group]
    return ptx.apply_fsdp2(model, dp, units=units, mp_policy=policy)


def options_of(cell: Cell) -> dict[str, Any]:
    options = OPTIONS[cell.options] | {"reduction": cell.reduction}
    return options | ({"logit_scale": 1000.0} if cell.labels == "huge" else {})


def classes_of(cell: Cell) -> int:
    return VOCABULARIES[cell.vocabulary][1]


def autocast(cell: Cell) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=cell.dtype == "autocast")


@functools.cache
def data(cell: Cell, rank: int) -> tuple[Tensor, Tensor, tuple[slice, slice]]:
    """Tokens and labels [batch, sequence] of a data rank, and which part of them is the loss's."""
    rows, classes = VOCABULARIES[cell.vocabulary]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(rows, (BATCH, SEQ), generator=generator)
    # Every class once, so the first and the last of every rank's; then some again, and ignored ones.
    order = torch.randperm(BATCH * SEQ, generator=generator)
    labels = torch.arange(BATCH * SEQ) % classes
    labels[BATCH * SEQ - 3 - 2 * rank :] = -100
    labels = labels[order].reshape(BATCH, SEQ)
    if cell.labels == "all ignored" or (cell.labels == "one rank ignored" and rank == 0):
        labels[:] = -100
    labels[labels == -100] = OPTIONS[cell.options].get("ignore_index", -100)
    keep = WHOLE
    if cell.labels == "no tokens" or (cell.labels == "one rank without tokens" and rank == 0):
        keep = slice(None), slice(0)
    elif cell.labels == "one token":
        # The last: the first token of a sequence attends to nothing but itself.
        row, column = (labels != -100).nonzero()[-1].tolist()
        keep = slice(row, row + 1), slice(column, column + 1)
    return tokens, labels, keep


def upstream(cell: Cell, rank: int) -> Tensor:
    """The gradient of this rank's loss."""
    if cell.reduction != "none":
        return torch.tensor(0.4 + 0.3 * rank if cell.scaled else 1.0)
    *_, keep = data(cell, rank)
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.rand(BATCH, SEQ, generator=generator) + 0.5)[keep]
