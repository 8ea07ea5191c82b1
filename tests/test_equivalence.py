"""Every mesh of the table in equivalence.py computes what one process does, however it is executed."""

import functools
import itertools

import pytest
import torch

import equivalence
import harness
from equivalence import EXECUTIONS, MESHES, PLAIN, VARIANTS, Execution

BOUND = 1e-5  # fp32, max|difference| / max|reference| per tensor
LARGE = ("tp 4", "HSDP 2 x 1 x tp 2")  # whose dims are in others too
MOSTLY = [pytest.param(mesh, marks=pytest.mark.slow if mesh in LARGE else ()) for mesh in MESHES]


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process(mesh):
    _check(mesh, [(name, PLAIN) for name in VARIANTS])


@pytest.mark.timeout(330)
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process_however_executed(mesh):
    cells = [(name, how) for at, name, how in _pairwise_cover() if at == mesh]
    _check(mesh, cells, timeout=300, optimizers=("adamw",))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process_in_every_execution(mesh, name, record_property):
    worst = _check(mesh, [(name, how) for how in EXECUTIONS], timeout=3500)
    record_property("worst", worst)  # for --junitxml


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", ["1", "dp_shard 2", "tp 2", "dp_shard 2 x tp 2", "HSDP 2 x 2"])
def test_mesh_equals_one_process_under_inductor(mesh, record_property):
    how = [Execution(ac, "inductor", 3) for ac in (None, "full", "selective")]
    worst = _check(mesh, [("untied", h) for h in how], timeout=1500)
    record_property("worst", worst)


def test_the_cover_is_pairwise():
    cover = _pairwise_cover()
    factors = [
        (mesh, name, how.ac, how.backend, (how.micro_batches, how.reduce))
        for mesh, name, how in cover
    ]
    for a, b in itertools.combinations(range(5), 2):
        seen = {(row[a], row[b]) for row in factors}
        every = set(itertools.product({row[a] for row in factors}, {row[b] for row in factors}))
        assert seen == every, every - seen


@pytest.mark.parametrize("mesh", MOSTLY)
def test_bf16_params_with_fp32_reduce_stay_as_near_as_one_process(mesh):
    names = ["untied", "tied, no SP", "transformers"]
    cells = [(name, PLAIN) for name in names]
    ranks = equivalence.world_size(mesh)
    outcomes = harness.run(equivalence.train_on_mesh, ranks, mesh, cells, True, timeout=110)[0]
    for name, got in zip(names, outcomes):
        own = equivalence.gradient_distance(_bf16_reference(name), _reference(name))
        distance = equivalence.gradient_distance(got, _reference(name))
        assert 0 < distance <= 1.5 * own, (name, distance, own)


def _check(mesh, cells, timeout=110, optimizers=equivalence.OPTIMIZERS):
    """Hold every cell, on every rank, to the bound; gives the largest differences of all of them."""
    ranks = equivalence.world_size(mesh)
    answers = harness.run(
        equivalence.train_on_mesh, ranks, mesh, cells, optimizers=optimizers, timeout=timeout
    )
    largest = {}
    for rank, outcomes in enumerate(answers):
        for (name, how), got in zip(cells, outcomes):
            want = _reference(name)
            assert got.weights_hash == want.weights_hash, (name, str(how), rank)
            worst = equivalence.difference(got, want)
            assert max(worst.values()) <= BOUND, (name, str(how), rank, worst)
            largest = {kind: max(worst[kind], largest.get(kind, 0.0)) for kind in worst}
    return largest


def _pairwise_cover():
    """Each mesh with each variant once, the executions dealt out so that any two factors meet."""
    return [
        (mesh, name, EXECUTIONS[(2 * i + 5 * j) % len(EXECUTIONS)])
        for i, mesh in enumerate(MESHES)
        for j, name in enumerate(VARIANTS)
    ]


@functools.cache
def _reference(name):
    return equivalence.train_plainly(VARIANTS[name])


@functools.cache
def _bf16_reference(name):
    return equivalence.train_plainly(VARIANTS[name], torch.bfloat16)
