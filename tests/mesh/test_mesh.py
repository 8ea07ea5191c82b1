import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import distributed
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh, loss_mesh, seed_ranks
from ptx.mesh._mesh import MESH_DIMS, resolve_degrees


def test_degrees_of_all_factorisations_of_1_to_64():
    count = 0
    for world in range(1, 65):
        for shape in _factorisations(world, 5):
            degrees = dict(zip(MESH_DIMS, shape))
            assert resolve_degrees(degrees, world) == shape
            for dim in MESH_DIMS:
                assert resolve_degrees(degrees | {dim: -1}, world) == shape
            count += 1
    assert count == 3652


# Every shape of these worlds is built here, every shape of 1..64 by the slow test below.
@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 12, 30])
def test_groups_of_every_factorisation(world):
    for rank in {0, world - 1}:
        with _fake_world(rank, world):
            for shape in _factorisations(world, 5):
                _check_groups(shape, rank)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_every_factorisation_of_1_to_64():
    for world in range(1, 65):
        test_groups_of_every_factorisation(world)


def _check_groups(shape, rank):
    mesh = build_mesh(**dict(zip(MESH_DIMS, shape)), device_type="cpu")
    assert mesh.shape == shape
    assert mesh.mesh_dim_names == MESH_DIMS
    views = {(dim,): mesh[dim] for dim in MESH_DIMS}
    views["dp_replicate", "dp_shard"] = data_mesh(mesh)
    views["dp_replicate", "dp_shard", "cp"] = loss_mesh(mesh)
    fsdp = fsdp_mesh(mesh)
    assert fsdp.shape == (*([shape[1]] if shape[1] > 1 else []), shape[2] * shape[3])
    _check_view(fsdp, fsdp.ndim - 1, ("dp_shard", "cp"), shape, rank)
    if fsdp.ndim == 2:
        _check_view(fsdp, 0, ("dp_replicate",), shape, rank)
    for dims, view in views.items():
        assert view.ndim == 1
        _check_view(view, 0, dims, shape, rank)


def _check_view(view, dim, dims, shape, rank):
    want = _groups(shape, dims)
    mine = next(group for group in want if rank in group)
    assert dist.get_process_group_ranks(view.get_group(dim)) == mine, (shape, dims)
    assert view.get_local_rank(dim) == mine.index(rank)
    assert sorted(view._layout[dim].global_ranks(dist.get_world_size())) == want, (shape, dims)


def _groups(shape, dims):
    """The oracle: all groups of ranks that differ only in ``dims``, ranks counted in row-major order."""
    groups = {}
    for rank, at in enumerate(itertools.product(*map(range, shape))):
        key = tuple(i for i, dim in zip(at, MESH_DIMS) if dim not in dims)
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


def _factorisations(world, parts):
    if parts == 1:
        yield (world,)
        return
    for first in (d for d in range(1, world + 1) if world % d == 0):
        for rest in _factorisations(world // first, parts - 1):
            yield (first, *rest)


@contextmanager
def _fake_world(rank, size):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_views_create_no_new_groups_on_repeat(monkeypatch):
    with _fake_world(0, 16):
        mesh = build_mesh(dp_replicate=2, cp=2, tp=2, device_type="cpu")
        first = [data_mesh(mesh), fsdp_mesh(mesh), loss_mesh(mesh)]
        monkeypatch.setattr(dist, "new_group", None)  # a new group now would raise
        for view, again in zip(first, [data_mesh(mesh), fsdp_mesh(mesh), loss_mesh(mesh)]):
            assert view == again
            for dim in range(view.ndim):
                assert view.get_group(dim) is again.get_group(dim)


def test_views_of_a_dim_that_stands_alone_use_its_own_group():
    with _fake_world(0, 8):
        mesh = build_mesh(tp=2, device_type="cpu")
        for view in (data_mesh(mesh), fsdp_mesh(mesh), loss_mesh(mesh)):
            assert view.get_group() is mesh.get_group("dp_shard")


def test_views_refuse_a_slice():
    with _fake_world(0, 8):
        mesh = build_mesh(tp=2, device_type="cpu")
        for view in (data_mesh, fsdp_mesh, loss_mesh):
            with pytest.raises(ValueError, match=f"{view.__name__}: .*pass the whole mesh"):
                view(mesh["dp_shard", "tp"])


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"tp": 3},
            r"tp=3 needs a multiple of 3 ranks, the world has 8; .*dp_shard=4.*tp=2 would work",
        ),
        (
            {"tp": 4, "dp_shard": 4},
            r"needs 16 ranks, the world has 8; .*dp_shard=2.*tp=4 would work",
        ),
        (
            {"tp": 2, "dp_shard": 2},
            r"needs 4 ranks, the world has 8; .*dp_shard=4.*tp=2 would work",
        ),
        ({"tp": 0}, "tp must be positive"),
        ({"dp_replicate": -2, "cp": 0}, "dp_replicate, cp must be positive"),
        ({"tp": -1}, "only one dim can take the rest"),
        ({"tp": 16}, "needs a multiple of 16 ranks"),
    ],
)
def test_bad_degrees_name_every_degree_and_a_product_that_works(degrees, message):
    with _fake_world(0, 8), pytest.raises(ValueError, match=message) as error:
        build_mesh(**degrees, device_type="cpu")
    assert all(dim in str(error.value) for dim in MESH_DIMS)


def test_a_bad_degree_leaves_no_group_behind():
    with pytest.raises(ValueError, match="the world has 1"):
        build_mesh(tp=2, device_type="cpu")
    assert not dist.is_initialized()


@distributed(world_size=4)
def test_collectives_over_views_of_real_groups():
    mesh = build_mesh(dp_replicate=2, tp=2, device_type="cpu")
    for view, groups in [(data_mesh(mesh), ([0, 2], [1, 3])), (mesh["tp"], ([0, 1], [2, 3]))]:
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=view.get_group())
        assert total.item() == sum(next(g for g in groups if dist.get_rank() in g))


@distributed(world_size=4)
def test_seed_ranks_equal_over_tp_distinct_over_data_and_steps():
    mesh = build_mesh(dp_shard=2, tp=2, device_type="cpu")
    draws = []
    for seed, step in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        torch.manual_seed(dist.get_rank())
        seed_ranks(mesh, seed, step=step)
        draws.append(torch.rand(4))
    mine = torch.stack(draws)
    every = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(every, mine)
    assert torch.equal(every[0], every[1])
    assert torch.equal(every[2], every[3])
    assert torch.equal(mine[0], mine[3])
    assert len({tuple(row) for one in (every[0], every[2]) for row in one[:3].tolist()}) == 6


def test_D04_tp_ranks_read_the_same_sample():
    def sample_index(rank, **degrees):
        with _fake_world(rank, 4):
            return data_mesh(build_mesh(**degrees, device_type="cpu")).get_local_rank()

    assert [sample_index(rank, tp=2) for rank in range(4)] == [0, 0, 1, 1]
    assert [sample_index(rank, dp_replicate=2) for rank in range(4)] == [0, 1, 2, 3]


def test_seed_ranks_means_the_same_for_any_integer_type():
    with _fake_world(0, 2):
        mesh = build_mesh(device_type="cpu")
        draws = []
        for step in (3, np.int64(3), torch.tensor(3)):
            seed_ranks(mesh, 0, step=step)
            draws.append(torch.rand(3))
        assert torch.equal(draws[0], draws[1])
        assert torch.equal(draws[0], draws[2])
        with pytest.raises(TypeError, match="bool"):
            seed_ranks(mesh, True)
        with pytest.raises(TypeError):
            seed_ranks(mesh, 0, step=1.0)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 2.0}, "tp=2.0"),
        ({"tp": "2"}, "tp='2'"),
        ({"tp": True}, "tp=True"),
        ({"cp": None}, "cp=None"),
    ],
)
def test_degrees_must_be_integers(degrees, message):
    with _fake_world(0, 8), pytest.raises(ValueError, match=f"must be integers.*{message}"):
        build_mesh(**degrees, device_type="cpu")
