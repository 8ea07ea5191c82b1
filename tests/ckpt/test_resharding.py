"""Any mesh to any mesh, bit for bit: weights, moments, options, position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from ckpt.training import (
    MESHES,
    assert_equal,
    freeze_late,
    full_tensors,
    options,
    start,
    world_size,
)
from ptx.ckpt import AsyncCheckpointer

STEPS, MORE = 3, 2


def save_on(mesh_name: str, root: str) -> Any:
    run = start(mesh_name)
    run.train(STEPS)
    freeze_late(run)
    with AsyncCheckpointer(root) as checkpointer:
        checkpointer.save(STEPS, run.state, meta={"mesh": mesh_name})
        tensors, kept = full_tensors(run.state), options(run)
        run.train(MORE)
    return tensors, kept, run.losses[STEPS:], run.data.seen[STEPS * 8 :]


def load_on(mesh_name: str, roots: dict[str, str]) -> Any:
    answers = {}
    run = start(mesh_name, seed=1)
    for source, root in sorted(roots.items(), key=lambda item: item[0] != mesh_name):
        # The first load is into a new run, as on a resume; the others into one with a past.
        freeze_late(run)
        with AsyncCheckpointer(root) as checkpointer:
            assert checkpointer.load(run.state) == STEPS
            assert checkpointer.meta == {"mesh": source}
        tensors, kept = full_tensors(run.state), options(run)
        run.losses.clear()
        run.data.seen.clear()
        run.train(MORE)
        answers[source] = tensors, kept, [*run.losses], [*run.data.seen]
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    found = {}
    for mesh in MESHES:
        root = str(tmp_path_factory.mktemp("saved") / mesh.replace(" ", ""))
        found[mesh] = root, harness.run(save_on, world_size(mesh), mesh, root)[0]
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_C14_every_mesh_loads_what_every_mesh_saved(mesh: str, saved: Any) -> None:
    roots = {source: root for source, (root, _) in saved.items()}
    for answers in harness.run(load_on, world_size(mesh), mesh, roots):
        for source, (tensors, kept, losses, seen) in answers.items():
            want, want_kept, want_losses, want_seen = saved[source][1]
            assert_equal(tensors, want)
            assert kept == want_kept
            assert seen == want_seen
            if source == mesh:
                assert losses == want_losses
            else:
                assert losses == pytest.approx(want_losses, rel=1e-5)


def test_frozen_tied_and_never_stepped_parameters_are_in_the_checkpoint(saved: Any) -> None:
    tensors, *_ = saved["dp2"][1]
    assert "model.output.weight" not in tensors  # tied: once, under its first name
    assert "model.spare" in tensors
    assert not [name for name in tensors if name.startswith("optimizer.state.spare")]
    assert "optimizer.state.layers.1.ffn_norm.weight.exp_avg" in tensors
    assert torch.equal(tensors["model.count"], torch.arange(3.0))
    assert not [n for n in tensors if n.startswith("optimizer.state.layers.0.attention_norm")]


def test_all_meshes_write_the_same_number_of_values(saved: Any) -> None:
    """Each byte once, whatever is replicated: files differ by frames only."""
    sizes = {
        mesh: sum(f.stat().st_size for f in Path(root).glob("step-*/*.distcp"))
        for mesh, (root, _) in saved.items()
    }
    values = sum(t.nbytes for t in saved["1"][1][0].values())
    for mesh, size in sizes.items():
        assert values < size < values + 4096 * 200 * world_size(mesh), mesh
