"""Every mesh of the table in equivalence.py computes what one process does."""

import functools

import pytest
import torch

import equivalence
import harness
from equivalence import MESHES, VARIANTS

BOUND = 1e-5  # fp32, max|difference| / max|reference| per tensor


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process(mesh):
    answers = harness.run(
        equivalence.train_on_mesh, equivalence.world_size(mesh), mesh, list(VARIANTS), timeout=110
    )
    for name in VARIANTS:
        want = _reference(name)
        for rank, answer in enumerate(answers):
            got = answer[name]
            assert got.weights_hash == want.weights_hash, (name, rank)
            worst = equivalence.difference(got, want)
            assert max(worst.values()) <= BOUND, (name, rank, worst)


@pytest.mark.parametrize("mesh", MESHES)
def test_bf16_params_with_fp32_reduce_stay_as_near_as_one_process(mesh):
    names = ["untied", "tied, no SP", "transformers"]
    answers = harness.run(
        equivalence.train_on_mesh, equivalence.world_size(mesh), mesh, names, True, timeout=110
    )
    for name in names:
        own = equivalence.gradient_distance(_bf16_reference(name), _reference(name))
        distance = equivalence.gradient_distance(answers[0][name], _reference(name))
        assert 0 < distance <= 1.5 * own, (name, distance, own)


@functools.cache
def _reference(name):
    return equivalence.train_plainly(VARIANTS[name])


@functools.cache
def _bf16_reference(name):
    return equivalence.train_plainly(VARIANTS[name], torch.bfloat16)
