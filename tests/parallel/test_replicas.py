import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from collectives import CollectiveLog
from harness import distributed
from ptx.mesh import build_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel import _replicas
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._replicas import assert_replicas_equal
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan


def own():
    torch.manual_seed(0)
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24}
    return Transformer(ModelArgs(vocab_size=31, max_seq_len=8, **sizes))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def flip_a_bit(tensor, rank, entry=0):
    """Of the last byte of one entry, on one rank: the smallest change of the value."""
    if dist.get_rank() == rank:
        local(tensor.detach()).view(-1)[entry : entry + 1].view(torch.uint8)[0] ^= 1


def fails_with(model, mesh, message):
    """Every rank raises the same."""
    with pytest.raises(AssertionError, match=re.escape(f"assert_replicas_equal: {message}")):
        assert_replicas_equal(model, mesh)


@distributed(world_size=4)
def test_hsdp_with_tp():
    mesh = build_mesh(dp_replicate=2, dp_shard=1, tp=2, device_type="cpu")
    model = own()
    apply_tp(model, mesh["tp"])
    apply_fsdp2(model, fsdp_mesh(mesh))
    for view in (mesh["dp_replicate"], mesh["tp"], fsdp_mesh(mesh), mesh):
        assert_replicas_equal(model, view)

    # A shard of one replica: seen over dp_replicate, where ranks 1 and 3 hold the same.
    weight = model.layers["0"].attention.wq.weight
    flip_a_bit(weight, 3, entry=7)
    assert_replicas_equal(model, mesh["tp"])
    name = "'layers.0.attention.wq.weight' (16, 16) torch.float32 has other bits over"
    for view in (mesh["dp_replicate"], mesh):
        fails_with(model, view, f"{name} 'dp_replicate' on ranks [3] than rank 1")
    flip_a_bit(weight, 3, entry=7)
    assert_replicas_equal(model, mesh)

    # A norm is whole on every rank.
    flip_a_bit(model.norm.weight, 2)
    name = "'norm.weight' (16,) torch.float32 has other bits over"
    fails_with(model, mesh["tp"], f"{name} 'tp' on ranks [3] than rank 2")
    fails_with(model, mesh["dp_replicate"], f"{name} 'dp_replicate' on ranks [2] than rank 0")


@distributed(world_size=4)
def test_F06_hsdp_replicas_that_start_apart():
    """What plain fully_shard leaves after an initialisation by per-rank seeds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(10 + dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    fully_shard(model, mesh=mesh)
    assert_replicas_equal(model, mesh["shard"])
    with pytest.raises(AssertionError) as caught:
        assert_replicas_equal(model, mesh)
    # Each rank tells what the first group saw, also where another pair differs.
    assert str(caught.value) == (
        "assert_replicas_equal: '0.weight' (6, 4) torch.float32 has other bits over 'replicate'"
        " on ranks [2] than rank 0; so have 2 more of 3 tensors"
    )


@distributed(world_size=4)
def test_one_dim_over_shards_and_replicas():
    """All ranks in one dim: only those that hold the same shard are compared."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model = nn.ParameterDict(
        {
            "hsdp": nn.Parameter(
                distribute_tensor(torch.arange(5.0), mesh, [Replicate(), Shard(0)])
            ),
            "sharded": nn.Parameter(
                distribute_tensor(torch.arange(5.0), mesh["shard"], [Shard(0)])
            ),
            "plain": nn.Parameter(torch.ones(3)),
        }
    )
    assert_replicas_equal(model, everyone)
    flip_a_bit(model["sharded"], 3)
    fails_with(
        model, everyone, "'sharded' (5,) torch.float32 has other bits over 'all' on ranks [3] than"
    )
    flip_a_bit(model["sharded"], 3)
    flip_a_bit(model["hsdp"], 2)
    flip_a_bit(model["hsdp"], 3)
    message = "on ranks [2] than rank 0, ranks [3] than rank 1"
    fails_with(model, everyone, f"'hsdp' (5,) torch.float32 has other bits over 'all' {message}")
    assert_replicas_equal(model, mesh["shard"])


@distributed(world_size=2)
def test_plain_replicas_buffers_and_odd_values():
    everyone = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.randn(3, 5, generator=generator(1)).t()))
    model.register_buffer("cache", torch.full((7,), math.nan).bfloat16(), persistent=False)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("phase", torch.randn(3, generator=generator(2)).to(torch.complex64))
    model.register_buffer("none", torch.zeros(0, 4))
    with CollectiveLog() as log:
        assert_replicas_equal([model], everyone)
    assert log.count() == 3
    assert max(size for _, size in log.calls) <= 2 * 6 * 16  # two integers per tensor

    with torch.no_grad():
        for name in ("w", "cache", "count", "mask", "phase"):
            tensor = getattr(model, name)
            for entry in {0, tensor.numel() - 1}:
                flipped = (
                    tensor.detach().view(-1) if tensor.is_contiguous() else tensor.t().view(-1)
                )
                flip_a_bit(flipped, 1, entry)
                fails_with(model, everyone, f"{name!r} {tuple(tensor.shape)} {tensor.dtype} has")
                flip_a_bit(flipped, 1, entry)
        assert_replicas_equal(model, everyone)
        # The sign of zero, and which NaN it is, count; a NaN as such doesn't.
        model.w.zero_()
        assert_replicas_equal(model, everyone)
        if dist.get_rank() == 1:
            model.w.mul_(-1)
        fails_with(model, everyone, "'w' (5, 3)")


def generator(seed):
    return torch.Generator().manual_seed(seed)


@distributed(world_size=2)
def test_tensor_parallel_without_sequence_parallel():
    """Norms are plain parameters then, equal on all ranks; buffers too."""
    mesh = build_mesh(tp=2, device_type="cpu")
    model = own()
    apply_tp(model, mesh["tp"], tp_plan(model, sequence_parallel=False))
    assert_replicas_equal(model, mesh["tp"])
    norm = model.layers["0"].ffn_norm.weight
    flip_a_bit(norm, 1)
    fails_with(model, mesh["tp"], "'layers.0.ffn_norm.weight' (16,) torch.float32 has other bits")
    flip_a_bit(norm, 1)
    assert_replicas_equal(model, mesh["tp"])


@distributed(world_size=2)
def test_ranks_with_other_tensors():
    """Said, instead of waited for: no rank may gather tables of different sizes."""
    mesh = build_mesh(device_type="cpu")["dp_shard"]
    first = dist.get_rank() == 0
    fails_with(
        nn.Sequential(nn.Linear(3, 2, bias=first)),
        mesh,
        "'0.bias' (2,) torch.float32 is on rank 0 and not on both of ranks [0, 1] of 'dp_shard'",
    )
    fails_with(nn.Linear(2 if first else 3, 4), mesh, "'weight' (4, 2) torch.float32 is on rank 0")
    names = ("a", "b") if first else ("b", "a")
    model = nn.Module()
    for name in names:
        model.register_buffer(name, torch.zeros(1))
    fails_with(model, mesh, "the ranks [0, 1] of 'dp_shard' hold the same tensors in another order")


@distributed(world_size=4)
def test_pipeline_stages_are_not_compared():
    mesh = build_mesh(pp=2, dp_shard=2, device_type="cpu")
    model = nn.Linear(2 + mesh["pp"].get_local_rank(), 3)
    for p in model.parameters():
        nn.init.ones_(p)
    assert_replicas_equal(model, mesh)
    flip_a_bit(model.bias, 3)  # one stage fails, all ranks raise
    fails_with(model, mesh, "'bias' (3,) torch.float32 has other bits over 'dp_shard' on ranks [3]")


@distributed(world_size=1)
def test_a_world_of_one():
    mesh = build_mesh(device_type="cpu")
    model = apply_fsdp2(nn.Sequential(nn.Linear(2, 2)), fsdp_mesh(mesh), units=[])
    with CollectiveLog() as log:
        assert_replicas_equal(model, mesh)
    assert log.count() == 0
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    message = r"'weight' \(of 2 tensors\) is on meta; call materialize first"
    with pytest.raises(ValueError, match=message):
        assert_replicas_equal(meta, mesh)


@distributed(world_size=2)
def test_on_meta_on_one_rank_only():
    mesh = build_mesh(device_type="cpu")
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Linear(2, 2)
    fails_with(
        model, mesh, "'bias' (2,) torch.float32 on meta is on rank 1 and not on both of ranks"
    )
    with pytest.raises(ValueError, match="on meta; call materialize first"):
        assert_replicas_equal(nn.Linear(2, 2, device="meta"), mesh)


def test_checksum(monkeypatch):
    """Every single change is seen, moved words and chunks too; alignment doesn't matter."""
    monkeypatch.setattr(_replicas, "WORDS", 4)
    weights = _replicas._random_odd(4)

    def checksum(tensor):
        return _replicas._checksum(tensor, weights).item()

    base = torch.arange(23, dtype=torch.int16)
    seen = {checksum(base)}
    for entry in range(23):
        for bit in range(16):
            changed = base.clone()
            changed[entry] ^= 1 << bit if bit < 15 else -(2**15)
            seen.add(checksum(changed))
    assert len(seen) == 1 + 23 * 16
    assert checksum(base.roll(2)) not in seen  # whole words
    assert checksum(base.roll(8)) not in seen  # whole chunks
    shifted = torch.cat([torch.zeros(1, dtype=torch.int16), base])[1:]
    assert checksum(shifted) == checksum(base)
    # Changes of many words don't cancel: each last bit up or down, and each sign.
    signs = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * 4)
    words = torch.arange(100, 104, dtype=torch.int32)
    assert len({checksum(words + sign.int()) for sign in signs}) == len(signs)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert len({checksum(torch.ones(4, dtype=dtype) * sign) for sign in signs}) == len(signs)
        assert len({checksum(torch.zeros(4, dtype=dtype) * sign) for sign in signs}) == 2**4


@pytest.mark.gpu
def test_checksum_on_an_accelerator_is_that_of_cpu():
    weights = _replicas._random_odd(_replicas.WORDS)
    for tensor in (torch.randn(3 * _replicas.WORDS // 2), torch.randn(7, 3).bfloat16().t()):
        want = _replicas._checksum(tensor, weights)
        assert _replicas._checksum(tensor.cuda(), weights.cuda()).cpu() == want


@distributed(world_size=2)
def test_sparse_and_conjugated_buffers():
    mesh = build_mesh(dp_shard=2, device_type="cpu")
    model = nn.Module()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    model.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)).conj())
    model.register_buffer("sines", model.turns.imag)
    assert_replicas_equal(model, mesh)
    model.graph = (torch.eye(3) * (1 + dist.get_rank())).to_sparse()
    with pytest.raises(AssertionError, match="graph"):
        assert_replicas_equal(model, mesh)
