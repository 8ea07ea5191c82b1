"""Every loss, option, placement, head grouping and dtype against float64 in one process."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import harness
import ptx
from collectives import CollectiveLog
from loss import conformance, conformance_mesh, conformance_model
from loss.conformance_losses import CHUNKED, LOSSES, OF_HIDDEN, OF_LOGITS, fits, on_full_logits
from loss.conformance_table import (
    PLACEMENTS,
    Cell,
    every_call,
    every_option,
    factors,
    makes_sense,
    pairs_of,
    pairwise,
    quick_factors,
)

TABLE = [(placement, group) for placement in PLACEMENTS for group in factors(placement)["group"]]


@pytest.mark.timeout(330)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_two_factors(placement: str) -> None:
    _check(placement, list(pairwise(placement)), timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("placement", "group"), TABLE)
def test_every_option(placement: str, group: str) -> None:
    _check(placement, list(every_option(placement, group)), timeout=1700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("placement", "group"), TABLE)
def test_every_call(placement: str, group: str) -> None:
    _check(placement, list(every_call(placement, group)), timeout=1700)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ranks", [1, 4])
def test_full_logits(loss: str, ranks: int) -> None:
    harness.run(_on_full_logits, ranks, loss, False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_full_logits_with_every_option(loss: str, ranks: int) -> None:
    harness.run(_on_full_logits, ranks, loss, True, timeout=290)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_L07_bad_labels_raise_on_every_rank_before_any_collective(placement: str) -> None:
    harness.run(_refuse_bad_labels, _world(placement), placement)


def test_the_cover_is_pairwise() -> None:
    """What it leaves out are pairs that don't make sense together, whatever the rest is."""
    for placement in PLACEMENTS:
        values = quick_factors(placement)
        seen = set().union(*(pairs_of(cell) for cell in pairwise(placement)))
        for a, b in combinations(values, 2):
            for pair in product(((a, x) for x in values[a]), ((b, y) for y in values[b])):
                if pair not in seen:
                    assert not makes_sense(Cell(**dict(pair))), (placement, pair)
        assert {cell for cell in pairwise(placement) if not makes_sense(cell)} == set()


def _check(placement: str, cells: list[Cell], timeout: float) -> None:
    answers = harness.run(
        conformance_mesh.run_cells, _world(placement), placement, cells, timeout=timeout
    )
    for rank, problems in enumerate(answers):
        what = f"rank {rank}, {len(problems)} problems in {len(cells)} cells:"
        assert not problems, "\n".join([what, *problems])


def _world(placement: str) -> int:
    return math.prod(PLACEMENTS[placement].values())


def _on_full_logits(loss: str, every_option: bool) -> None:
    """Cases that need exact logits, which no small model makes: huge, -inf, padded, strided."""
    tp = init_device_mesh("cpu", (dist.get_world_size(),))
    gather = _summed if loss in OF_LOGITS else _as_it_is
    # Over 4 ranks 3 3 3 1, 3 3 3 3, and 1 1 1 and an empty shard.
    vocabularies, chunks = (10, 12, 3), (None, 3, 1)
    pairs = product(vocabularies, chunks) if every_option else zip(vocabularies, chunks)
    for vocab_size, chunk in pairs:
        if chunk is not None and loss not in CHUNKED and every_option:
            continue
        call = on_full_logits(loss, tp, chunk)
        for case in conformance.cases(vocab_size, every_option=every_option):
            # No finite hidden state gives a logit of -inf.
            possible = loss in OF_LOGITS or case.name != "masked columns"
            if possible and fits(loss, case.options):
                roundings = 2 if loss in OF_HIDDEN else 1
                conformance.check(call, case, gather=gather, roundings=roundings)


def _summed(grad: Tensor) -> Tensor:
    # A rank's gradient is 0 outside its columns, so the sum is all columns side by side.
    total = grad.clone()
    dist.all_reduce(total)
    return total


def _as_it_is(grad: Tensor) -> Tensor:
    return grad


def _refuse_bad_labels(placement: str) -> None:
    mesh = conformance_model.build_mesh(placement)
    rank = ptx.data_mesh(mesh).get_local_rank()
    groups = factors(placement)["group"]
    for loss, group in product(LOSSES, (groups[0], groups[-1])):
        for vocabulary, bad in (("13", -1), ("13", 13), ("7 of 13", 7)):
            cell = Cell(loss=loss, group=group, vocabulary=vocabulary)
            if not makes_sense(cell):
                continue
            model = conformance_model.wrapped(mesh, cell)
            tokens, labels, _ = conformance_model.data(cell, rank)
            labels = labels.clone()
            labels[0, 3] = bad
            states = model(tokens, return_hidden=loss in OF_HIDDEN)
            with CollectiveLog() as seen, pytest.raises(ValueError, match=f"first is {bad}"):
                conformance_mesh.loss_of(model, states, labels, mesh["tp"], cell)
            assert not seen.count(), f"{cell}: {seen.calls}"
        if makes_sense(cell):  # nobody was left in a collective: the next step is right
            problems = conformance_mesh.check_cell(mesh, cell)
            assert not problems, f"{cell}: {problems}"
