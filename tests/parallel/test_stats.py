import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from collectives import CollectiveLog
from harness import distributed
from ops import NoScalarReads
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel import _stats
from ptx.parallel._clip import clip_grad_norm_
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._stats import COLUMNS, ModelStats, model_stats
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan

VOCAB, SEQ, ROWS = 31, 8, 4


def bag(*tensors, grads=None):
    """A module of these parameters, named a, b, ...; their gradients default to twice the values."""
    module = nn.Module()
    for i, (name, tensor) in enumerate(zip("abcdefghijkl", tensors)):
        parameter = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        module.register_parameter(name, parameter)
        if parameter.requires_grad:
            parameter.grad = 2 * parameter.detach() if grads is None else grads[i]
    return module


def expected(tensor):
    """[norm, max_abs, nonfinite] by float64."""
    values = tensor.detach().double()
    finite = values[values.isfinite()]
    largest = finite.abs().max() if finite.numel() else torch.zeros(())
    return [finite.norm().item(), largest.item(), values.numel() - finite.numel()]


def expected_table(model):
    rows = []
    for p in model.parameters():
        rows.append(expected(p) + ([0.0] * 3 if p.grad is None else expected(p.grad)))
    each = torch.tensor(rows, dtype=torch.float64)
    total = torch.cat(
        [
            torch.stack([each[:, i].norm(), each[:, i + 1].max(), each[:, i + 2].sum()])
            for i in (0, 3)
        ]
    )
    return torch.cat([total[None], each]).float()


def assert_stats(stats, reference, rtol=1e-6):
    assert stats.names == tuple(name for name, _ in reference.named_parameters())
    torch.testing.assert_close(stats.table, expected_table(reference), rtol=rtol, atol=0)


def test_plain_model():
    torch.manual_seed(0)
    tensors = [torch.randn(7, 3), torch.randn(()), torch.zeros(0, 4), torch.randn(4, 6).t()]
    model = bag(*tensors, torch.randn(300, 40).bfloat16(), torch.randn(3).half())
    model.f.grad = None
    assert_stats(model_stats(model), model)


def test_log_names_and_floats():
    model = bag(torch.tensor([3.0, -4.0]), torch.tensor([0.0, 12.0]))
    model.b.grad = None
    stats = model_stats(model)
    total = {
        "param/norm": 13.0,
        "param/max_abs": 12.0,
        "param/nonfinite": 0.0,
        "grad/norm": 10.0,
        "grad/max_abs": 8.0,
        "grad/nonfinite": 0.0,
    }
    assert stats.flat() == total
    named = stats.flat(by_name=True)
    assert {key: named[key] for key in total} == total
    assert len(named) == 3 * len(COLUMNS)
    assert named["param/norm/a"] == 5.0
    assert named["grad/max_abs/a"] == 8.0
    assert named["grad/norm/b"] == 0.0
    assert stats["grad/norm"].shape == ()
    assert stats["grad/norm"] == 10.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_entries_poison_nothing_else(dtype):
    model = bag(*(torch.randn(4, 5).to(dtype) for _ in range(4)))
    model.a.grad[1] = math.nan
    model.b.grad[0, 0], model.b.grad[0, 1] = math.inf, -math.inf
    model.c.grad[:] = math.nan
    model.d.data[2, 2] = math.nan
    before = [p.grad.clone() for p in model.parameters()]
    stats = model_stats(model)
    assert_stats(stats, model)
    assert stats.flat()["grad/nonfinite"] == 5 + 2 + 20
    assert stats.flat()["param/nonfinite"] == 1
    assert math.isfinite(stats.flat()["grad/norm"])
    for p, g in zip(model.parameters(), before):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)


def test_unusual_dtypes():
    model = bag(
        torch.tensor([3 + 4j, 0j]), torch.tensor([3, -4], dtype=torch.int8), torch.tensor([True])
    )
    stats = model_stats(model).flat(by_name=True)
    assert stats["param/norm/a"] == stats["param/max_abs/a"] == 5.0
    assert stats["param/norm/b"] == 5.0
    assert stats["param/norm/c"] == 1.0
    double = bag(torch.full((3,), 1e200, dtype=torch.float64) / 1e60, torch.ones(2))
    assert model_stats(double)["param/max_abs"] == 1e140
    assert model_stats(double).table.dtype == torch.float64


def test_sparse_gradients_no_gradients_and_nothing():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    assert model_stats(embedding)["grad/norm"] == torch.tensor(2.0 * 4 + 2).sqrt()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert model_stats(frozen)["grad/norm"] == 0
    assert model_stats(nn.ReLU()).flat() == dict.fromkeys(COLUMNS, 0.0)


def test_names_ties_and_parts():
    block = nn.Sequential(nn.Linear(3, 3), checkpoint_wrapper(nn.Linear(3, 3)))
    block.append(nn.Linear(3, 3, bias=False))
    block[2].weight = block[0].weight
    assert model_stats(block).names == ("0.weight", "0.bias", "1.weight", "1.bias")
    head = nn.ModuleDict({"head": nn.Linear(3, 3)})
    head["head"].weight = block[0].weight
    stats = model_stats([block, head, block])
    assert stats.names[4:] == ("head.bias",)
    squares = sum(p.square().sum() for p in {*block.parameters(), *head.parameters()})
    torch.testing.assert_close(stats["param/norm"], squares.sqrt())


def test_wrong_arguments():
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="model_stats: 'weight' is on meta; call materialize first"
    ):
        model_stats(meta)
    with pytest.raises(ValueError, match="two parts have a parameter 'bias'; call it for each"):
        model_stats([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(KeyError, match="grad/mean"):
        model_stats(nn.Linear(2, 2))["grad/mean"]


@pytest.mark.parametrize("batch", [2**24, 50, 7])
def test_the_way_of_accelerators_gives_the_same_numbers(monkeypatch, batch):
    """In batches of many tensors and pieces of one, without a look at the numbers."""
    monkeypatch.setattr(_stats, "BATCH", batch)
    torch.manual_seed(0)
    tensors = [torch.randn(20), torch.randn(3, 13), torch.randn(1), torch.randn(6, 4).t()]
    tensors[0][3:5] = math.nan
    tensors[1][0, 0] = -math.inf
    before = [t.clone() for t in tensors]
    with NoScalarReads():
        rows = _stats._measure_many(tensors, torch.float32)
    for t, b, row in zip(tensors, before, rows):
        torch.testing.assert_close(row, _stats._measure_on_cpu(t, torch.float32))
        torch.testing.assert_close(t, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_on_an_accelerator_without_a_sync():
    torch.manual_seed(0)
    model = bag(torch.randn(300, 40), torch.randn(5).bfloat16(), torch.zeros(0), torch.randn(()))
    model.a.grad[0, :3] = math.nan
    on_device = bag(
        *(p.detach().cuda() for p in model.parameters()),
        grads=[p.grad.cuda() for p in model.parameters()],
    )
    model_stats(on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = model_stats(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.table.is_cuda
    assert_stats(ModelStats(stats.names, stats.table.cpu()), model)


def own(tie=False):
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24}
    return Transformer(ModelArgs(vocab_size=VOCAB, max_seq_len=SEQ, tie_embeddings=tie, **sizes))


def backward(model, tokens):
    logits = model(tokens)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()


def assert_equal_on_all_ranks(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    assert all(torch.equal(other, tensor) for other in others)


def assert_as_one_process(degrees, collectives, *, tie=False, sequence_parallel=True, fsdp=True):
    mesh = build_mesh(**degrees, device_type="cpu")
    torch.manual_seed(0)
    reference, model = own(tie), own(tie)
    model.load_state_dict(reference.state_dict())
    apply_tp(model, mesh["tp"], tp_plan(model, sequence_parallel=sequence_parallel))
    if fsdp:
        apply_fsdp2(model, fsdp_mesh(mesh))
    tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    data = data_mesh(mesh)
    backward(reference, tokens)
    backward(model, tokens.chunk(data.size())[data.get_local_rank()])
    placements = [p.grad.placements for p in model.parameters() if isinstance(p.grad, DTensor)]
    with CollectiveLog() as log:
        stats = model_stats(model)
    assert log.count() == collectives, log.calls
    assert_stats(stats, reference, rtol=2e-5)
    assert_equal_on_all_ranks(stats.table)
    assert placements == [
        p.grad.placements for p in model.parameters() if isinstance(p.grad, DTensor)
    ]
    torch.testing.assert_close(stats["grad/norm"], clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(
        model_stats(model)["grad/norm"], torch.tensor(0.1), rtol=1e-4, atol=0
    )


@distributed(world_size=2)
def test_fsdp_2_and_tp_2():
    assert_as_one_process({"dp_shard": 2}, 2)
    assert_as_one_process({"dp_shard": 2}, 2, tie=True)
    assert_as_one_process({"dp_replicate": 2, "dp_shard": 1}, 0)
    # Partial gradients of norms: one sum for all of them.
    assert_as_one_process({"tp": 2}, 3, fsdp=False)
    assert_as_one_process({"tp": 2}, 3, fsdp=False, tie=True)
    assert_as_one_process({"tp": 2}, 2, fsdp=False, sequence_parallel=False)


@distributed(world_size=4)
def test_four_ranks():
    assert_as_one_process({"dp_shard": 4}, 2)
    assert_as_one_process({"dp_replicate": 2, "dp_shard": 2}, 2)
    assert_as_one_process({"dp_shard": 2, "tp": 2}, 4)
    assert_as_one_process({"dp_shard": 2, "tp": 2}, 4, sequence_parallel=False, tie=True)
    assert_as_one_process({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 2)


def layouts():
    """(mesh, placements) of one world of 4: what TP, FSDP, HSDP and both together give."""
    data_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    all_dp = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return [
        None,
        (data_tp["dp"], [Shard(0)]),
        (data_tp["tp"], [Shard(1)]),
        (data_tp, [Shard(0), Shard(1)]),
        (data_tp, [Shard(0), Shard(0)]),
        (data_tp, [Replicate(), Shard(0)]),
        (data_tp, [Shard(0), Replicate()]),
        (all_dp, [Shard(0)]),
    ]


@distributed(world_size=4)
def test_any_mix_of_meshes_with_non_finite_entries_on_some_ranks():
    torch.manual_seed(0)  # the same full tensors on every rank
    where = layouts()
    for rows in (8, 5, 1):  # 5 and 1 leave uneven and empty shards
        plain = bag(*(torch.randn(rows, 3) for _ in where))
        plain.b.grad[-1, 0] = math.nan  # on one of the ranks over dp
        plain.e.grad[0, 0] = math.inf
        plain.d.data[0, 2] = -math.inf
        plain.g.grad = None
        mine = nn.Module()
        for (name, p), layout in zip(plain.named_parameters(), where):
            sharded = nn.Parameter(
                p.detach().clone() if layout is None else distribute_tensor(p.detach(), *layout)
            )
            if p.grad is not None:
                sharded.grad = p.grad if layout is None else distribute_tensor(p.grad, *layout)
            mine.register_parameter(name, sharded)
        with CollectiveLog() as log:
            stats = model_stats(mine)
        assert log.count() == log.count("allreduce") == 2 * 3  # dp, tp, all
        assert_stats(stats, plain)
        assert_equal_on_all_ranks(stats.table)


@distributed(world_size=4)
def test_partial_gradients_count_and_stay():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    summand = torch.tensor([3.0, -1.0, 0.0]) if rank % 2 else torch.tensor([0.0, 1.0, 4.0])
    cases = [
        (mesh["tp"], [Replicate()], [Partial()], 5.0),
        (mesh["tp"], [Replicate()], [Partial("avg")], 2.5),
        (mesh, [Replicate(), Replicate()], [Replicate(), Partial()], 5.0),
        (mesh, [Replicate(), Replicate()], [Partial(), Partial()], 10.0),
        (mesh["tp"], [Shard(0)], [Partial()], 5.0),
    ]
    for some in (cases, *([case] for case in cases)):
        model = nn.Module()
        for i, (where, placements, of_grad, _) in enumerate(some):
            parameter = nn.Parameter(distribute_tensor(torch.zeros(3), where, placements))
            parameter.grad = DTensor.from_local(summand.clone(), where, of_grad)
            model.register_parameter(f"p{i}", parameter)
        stats = model_stats(model)
        assert stats.table[1:, 3].tolist() == [norm for *_, norm in some]
        assert_equal_on_all_ranks(stats.table)
        for p, (*_, of_grad, _) in zip(model.parameters(), some):
            assert p.grad.placements == tuple(of_grad)
            assert torch.equal(p.grad.to_local(), summand)


@distributed(world_size=4)
def test_pipeline_stages_share_the_totals():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    stages = [nn.ModuleDict({name: nn.Linear(4, 3)}) for name in ("first", "second")]
    for stage in stages:
        for p in stage.parameters():
            p.grad = torch.randn(p.shape)
    want = expected_table(nn.ModuleList(stages))[0]
    mine = nn.ModuleDict()
    for name, layer in stages[mesh["pp"].get_local_rank()].items():
        for key, p in list(layer.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(p.detach(), mesh["dp"], [Shard(0)]))
            sharded.grad = distribute_tensor(p.grad, mesh["dp"], [Shard(0)])
            setattr(layer, key, sharded)
        mine[name] = layer
    stats = model_stats([mine], pp_mesh=mesh["pp"])
    torch.testing.assert_close(stats.table[0], want)
    assert_equal_on_all_ranks(stats.table[0])
    assert len(stats.names) == 2
    with pytest.raises(ValueError, match=r"pp_mesh has dims \('pp', 'dp'\); pass the 1-D mesh"):
        model_stats(mine, pp_mesh=mesh)
