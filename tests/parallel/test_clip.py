import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from collectives import CollectiveLog
from harness import distributed
from ops import NoScalarReads
from ptx.parallel._clip import clip_grad_norm_

NORMS = [2.0, math.inf, 1.0, 3.0]


def parameters_with_grads(*shapes, dtype=torch.float32):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
    return parameters


def copies(parameters):
    clones = [nn.Parameter(p.detach().clone()) for p in parameters]
    for clone, p in zip(clones, parameters):
        clone.grad = None if p.grad is None else p.grad.clone()
    return clones


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3])
def test_matches_torch_on_plain_parameters(norm_type, max_norm):
    torch.manual_seed(0)
    mine = parameters_with_grads((3, 4), (5,), (0, 2), (), (2, 2))
    mine[1].grad = None
    theirs = copies(mine)
    got = clip_grad_norm_(mine, max_norm, norm_type=norm_type)
    # torch's own can't take the inf norm of an empty gradient.
    want = nn.utils.clip_grad_norm_(
        [p for p in theirs if p.grad is not None and p.grad.numel()], max_norm, norm_type
    )
    torch.testing.assert_close(got, want)
    assert got.shape == ()
    for p, q in zip(mine, theirs):
        assert (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p.grad, q.grad)


def test_infinite_max_norm_only_measures():
    (parameter,) = parameters_with_grads((4,))
    parameter.grad[0] = math.inf
    before = parameter.grad.clone()
    assert clip_grad_norm_(parameter, math.inf) == math.inf
    assert torch.equal(parameter.grad, before)


def test_F12_generator_list_and_single_tensor_are_clipped():
    def grad_norm(parameters):
        return torch.cat([p.grad.flatten() for p in parameters]).norm()

    layer = nn.Linear(3, 2)
    for parameters in (lambda: layer.parameters(), lambda: list(layer.parameters())):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        torch.testing.assert_close(clip_grad_norm_(parameters(), 0.1), torch.tensor(8.0).sqrt())
        torch.testing.assert_close(grad_norm(layer.parameters()), torch.tensor(0.1))
    layer.weight.grad = torch.ones(2, 3)
    torch.testing.assert_close(clip_grad_norm_(layer.weight, 0.1), torch.tensor(6.0).sqrt())
    torch.testing.assert_close(grad_norm([layer.weight]), torch.tensor(0.1))


def test_a_parameter_given_twice_counts_once():
    (parameter,) = parameters_with_grads((4,))
    norm = parameter.grad.norm()
    torch.testing.assert_close(clip_grad_norm_([parameter, parameter], norm.item() / 2), norm)
    torch.testing.assert_close(parameter.grad.norm(), norm / 2)


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0) == 0.0
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert clip_grad_norm_([frozen], 1.0, norm_type=math.inf) == 0.0
    assert frozen.grad is None


def test_dtypes():
    """bf16 squares are summed in float32, and mixed dtypes keep theirs."""
    mine = parameters_with_grads((4096,), dtype=torch.bfloat16)
    mine[0].grad.fill_(0.1)
    exact = mine[0].grad.double().norm().float()
    got = clip_grad_norm_(mine, 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=0)
    scaled = (0.1 * torch.ones(4096).bfloat16() / (exact + 1e-6)).bfloat16()
    torch.testing.assert_close(mine[0].grad, scaled, rtol=1e-2, atol=0)

    mixed = parameters_with_grads((3,)) + parameters_with_grads((3,), dtype=torch.bfloat16)
    mixed += parameters_with_grads((3,), dtype=torch.float64)
    want = torch.cat([p.grad.double() for p in mixed]).norm()
    got = clip_grad_norm_(mixed, want.item() / 4)
    torch.testing.assert_close(got, want)
    after = torch.cat([p.grad.double() for p in mixed]).norm()
    torch.testing.assert_close(after, want / 4, rtol=1e-2, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_not_finite_norm_is_as_in_torch(norm_type):
    for bad, healthy in ((math.nan, math.nan), (math.inf, 0.0)):
        mine = parameters_with_grads((3,), (2,))
        mine[0].grad[1] = bad
        theirs = copies(mine)
        got = clip_grad_norm_(mine, 1.0, norm_type=norm_type)
        want = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
        torch.testing.assert_close(got, want, equal_nan=True)
        for p, q in zip(mine, theirs):
            torch.testing.assert_close(p.grad, q.grad, equal_nan=True)
        torch.testing.assert_close(mine[1].grad.abs(), torch.full((2,), healthy), equal_nan=True)


def test_large_gradients_are_summed_exactly():
    """torch's own norm of these is off by 4e-4, and differently for every sharding."""
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.zeros(1_000_003, dtype=dtype))
        parameter.grad = torch.full_like(parameter, 0.1)
        want = parameter.grad.double().norm().float()
        torch.testing.assert_close(clip_grad_norm_(parameter, math.inf), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("norm_type", NORMS)
def test_never_waits_for_the_device(norm_type):
    parameters = parameters_with_grads((3,), (2,))
    with NoScalarReads():
        clip_grad_norm_(parameters, 0.1, norm_type=norm_type)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": -1.0}, "max_norm=-1.0 must be"),
        ({"max_norm": math.nan}, "max_norm=nan must be"),
        ({"max_norm": 1.0, "norm_type": 0.0}, "norm_type=0.0 must be"),
        ({"max_norm": 1.0, "norm_type": -math.inf}, "norm_type=-inf must be"),
        ({"max_norm": -1.0, "norm_type": math.nan}, "max_norm=-1.0 .*; norm_type=nan"),
    ],
)
def test_wrong_numbers(arguments, message):
    parameters = parameters_with_grads((2,))
    before = parameters[0].grad.clone()
    with pytest.raises(ValueError, match=f"clip_grad_norm_: {message}"):
        clip_grad_norm_(parameters, **arguments)
    assert torch.equal(parameters[0].grad, before)


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, math.inf])
def test_complex_gradients(norm_type):
    for dtype in (torch.complex64, torch.complex128):
        mine, theirs = (nn.Parameter(torch.zeros(700, dtype=dtype)) for _ in range(2))
        torch.manual_seed(0)
        mine.grad = torch.randn(700, dtype=dtype)
        theirs.grad = mine.grad.clone()
        norm = clip_grad_norm_([mine], 1.0, norm_type=norm_type)
        want = nn.utils.clip_grad_norm_([theirs], 1.0, norm_type)
        torch.testing.assert_close(norm, want)
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"\[\(5, 2\)\] are sparse; build embeddings with"):
        clip_grad_norm_(embedding.parameters(), 1.0)


@distributed(world_size=2)
def test_F04_tensor_parallel_and_plain_parameters():
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False)
    )
    x = torch.randn(3, 4)
    parallelize_module(model, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(x).pow(2).sum().backward()
    with CollectiveLog() as log:
        norm = clip_grad_norm_(model.parameters(), 0.5)
    assert type(norm) is torch.Tensor
    assert norm.item() == pytest.approx(1.3385679, rel=1e-6)
    assert log.count() == 1
    assert clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(0.5, rel=1e-5)


def layouts():
    """(mesh, placements) of one world of 4: what TP, FSDP, HSDP and both together give."""
    data_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    all_dp = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return [
        None,
        (data_tp["dp"], [Shard(0)]),
        (data_tp["tp"], [Shard(0)]),
        (data_tp["tp"], [Shard(1)]),
        (data_tp["tp"], [Replicate()]),
        (data_tp, [Shard(0), Shard(1)]),
        (data_tp, [Shard(0), Shard(0)]),
        (data_tp, [Replicate(), Shard(0)]),
        (data_tp, [Shard(0), Replicate()]),
        (all_dp, [Shard(0)]),
    ]


@distributed(world_size=4)
def test_any_mix_of_meshes_counts_every_entry_once():
    torch.manual_seed(0)  # the same full gradients on every rank
    where = layouts()
    for norm_type in NORMS:
        for rows in (8, 5, 1):  # 5 and 1 leave uneven and empty shards
            plain = parameters_with_grads(*[(rows, 3)] * len(where))
            mine = []
            for p, layout in zip(plain, where):
                sharded = nn.Parameter(
                    p.detach() if layout is None else distribute_tensor(p, *layout)
                )
                sharded.grad = (
                    p.grad.clone() if layout is None else distribute_tensor(p.grad.clone(), *layout)
                )
                mine.append(sharded)
            with CollectiveLog() as log:
                got = clip_grad_norm_(mine, 0.1, norm_type=norm_type)
            assert log.count() == log.count("allreduce") == 3  # dp, tp, all
            want = nn.utils.clip_grad_norm_(plain, 0.1, norm_type)
            torch.testing.assert_close(got, want)
            gathered = [torch.empty(()) for _ in range(4)]
            dist.all_gather(gathered, got)
            assert all(torch.equal(other, got) for other in gathered)
            for p, q in zip(mine, plain):
                full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(full, q.grad)


@distributed(world_size=4)
def test_odd_gradients_on_meshes():
    """Partial ones, missing ones, a NaN on one rank, and what the local norm would have been."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()

    # A partial gradient counts, and stays, as its sum; the norm isn't that of the summands.
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh["tp"], [Replicate()]))
    summand = torch.tensor([3.0, -1.0, 0.0]) if rank % 2 else torch.tensor([0.0, 1.0, 4.0])
    parameter.grad = DTensor.from_local(summand, mesh["tp"], [Partial()])
    assert clip_grad_norm_(parameter, 2.5).item() == 5.0
    assert parameter.grad.placements == (Replicate(),)
    torch.testing.assert_close(parameter.grad.to_local(), torch.tensor([1.5, 0.0, 2.0]))

    # Only ranks 0 and 1 have a gradient; the others still take part.
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0), Shard(0)]))
    if rank < 2:
        parameter.grad = DTensor.from_local(torch.ones(1), mesh, [Shard(0), Shard(0)])
    torch.testing.assert_close(clip_grad_norm_(parameter, 1.0), torch.tensor(2.0).sqrt())

    # Every rank hears of a NaN, although MAX may drop it.
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0), Shard(0)]))
    for norm_type in (2.0, math.inf):
        local = torch.tensor([math.nan if rank == 1 else 7.0])
        parameter.grad = DTensor.from_local(local, mesh, [Shard(0), Shard(0)])
        assert clip_grad_norm_(parameter, 1.0, norm_type=norm_type).isnan()
        assert parameter.grad.to_local().isnan().all()

    with pytest.raises(ValueError, match=r"pp_mesh has dims \('dp', 'tp'\); pass the 1-D"):
        clip_grad_norm_(parameter, 1.0, pp_mesh=mesh)


@distributed(world_size=4)
def test_pipeline_stages_share_one_norm():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    stages = [parameters_with_grads((4, 3), (2,)), parameters_with_grads((6,))]
    everything = copies([*stages[0], *stages[1]])
    for norm_type in NORMS:
        stage = copies(stages[mesh["pp"].get_local_rank()])
        sharded = nn.Parameter(distribute_tensor(stage[0].detach(), mesh["dp"], [Shard(0)]))
        sharded.grad = distribute_tensor(stage[0].grad, mesh["dp"], [Shard(0)])
        with CollectiveLog() as log:
            got = clip_grad_norm_(
                [sharded, *stage[1:]], 0.3, norm_type=norm_type, pp_mesh=mesh["pp"]
            )
        assert log.count() == 2
        want = copies(everything)
        torch.testing.assert_close(got, nn.utils.clip_grad_norm_(want, 0.3, norm_type))
        mine = want[:2] if mesh["pp"].get_local_rank() == 0 else want[2:]
        torch.testing.assert_close(sharded.grad.full_tensor(), mine[0].grad)
    # A stage without parameters takes part as well.
    first = mesh["pp"].get_local_rank() == 0
    got = clip_grad_norm_(copies(stages[0]) if first else [], 0.3, pp_mesh=mesh["pp"])
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(copies(stages[0]), 0.3))


@distributed(world_size=4)
def test_guard_clipping_by_a_local_norm():
    """TP x FSDP, as torch wraps it: the scale is the same on all ranks, and the single process's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))

    reference, model = build(), build()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    F.mse_loss(reference(x), torch.zeros(4, 3)).backward()
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    F.mse_loss(model(mine), torch.zeros(2, 3)).backward()

    local = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
    with CollectiveLog() as log:
        got = clip_grad_norm_(model.parameters(), 0.01)
    assert log.count() == 2
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(got, want)
    assert (local / want - 1).abs() > 0.1
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
