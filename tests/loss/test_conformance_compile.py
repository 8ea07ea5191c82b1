"""A compiled caller of each loss gets the same loss and gradients, from one graph where torch allows it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

import harness
from loss import conformance_mesh
from loss.conformance_losses import CHUNKED, LOSSES, OF_HIDDEN
from loss.conformance_table import PLACEMENTS, Cell, factors, makes_sense

PLAIN = [Cell(loss=loss, chunk=5 if loss in CHUNKED else None, calls="compiled") for loss in LOSSES]


@pytest.mark.parametrize(
    ("placement", "losses"),
    [("plain", LOSSES), ("tp 2", ("cross_entropy", *OF_HIDDEN))],  # those of logits are one there
    ids=["plain", "tp 2"],
)
def test_one_graph(placement: str, losses: tuple[str, ...]) -> None:
    cells = [replace(cell, group="module") for cell in PLAIN if cell.loss in losses]
    _check(placement, cells, timeout=100)


def test_a_head_that_fsdp_gathers_breaks_the_graph_once() -> None:
    _check("FSDP2", [cell for cell in PLAIN if cell.loss in OF_HIDDEN], timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_group_and_reduction(placement: str) -> None:
    values = factors(placement)
    cells = []
    for i, (cell, group, reduction) in enumerate(
        product(PLAIN, values["group"], values["reduction"])
    ):
        options = ("defaults", "all of RL" if cell.loss == "token_logprobs" else "all")[i % 2]
        layout = ("plain", values["layout"][-1])[i // 2 % 2]
        cell = replace(cell, group=group, reduction=reduction, options=options, layout=layout)
        cells += [cell] if makes_sense(cell) else []
    _check(placement, cells, timeout=1700)


def _check(placement: str, cells: list[Cell], timeout: float) -> None:
    world = math.prod(PLACEMENTS[placement].values())
    answers = harness.run(conformance_mesh.run_cells, world, placement, cells, timeout=timeout)
    for rank, problems in enumerate(answers):
        assert not problems, "\n".join([f"rank {rank}:", *problems])
