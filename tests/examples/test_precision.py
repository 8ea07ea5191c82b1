"""The dtypes that the summary names are those that the run used."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import ptx
from collectives import CollectiveLog
from harness import distributed
from precision import PrecisionProbe

TINY = ptx.ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=8)


def one_step(model, loss_of):
    probe = PrecisionProbe(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return probe.summary(optimizer, loss)


def float32_everywhere(**but):
    names = ("master", "compute", "output", "loss", "gradient", "reduce")
    names += ("optimizer/exp_avg", "optimizer/exp_avg_sq")
    matmul = f"float32 at {torch.get_float32_matmul_precision()!r} precision"
    want = dict.fromkeys(names, "float32") | {"matmul": matmul} | but
    return {f"precision/{name}": dtype for name, dtype in want.items() if dtype}


def test_a_plain_model():
    def loss_of(model):
        return model(torch.ones(2, 4)).sum()

    assert one_step(nn.Linear(4, 4), loss_of) == float32_everywhere(reduce=None)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 16, bias=False).bfloat16())
    mixed[0].register_forward_hook(lambda _, __, output: output.bfloat16())
    got = one_step(mixed, loss_of)
    share = "bfloat16 (76.2 %), float32 (23.8 %)"  # 64 of 84 entries
    for name in ("master", "compute", "gradient", "optimizer/exp_avg"):
        assert got[f"precision/{name}"] == share
    assert got["precision/output"] == got["precision/loss"] == "bfloat16"


@pytest.mark.parametrize("reduce", [torch.float32, None])
@pytest.mark.parametrize("tp", [1, 2])
@distributed(world_size=2)
def test_fsdp_with_a_policy(tp, reduce):
    mesh = ptx.build_mesh(tp=tp, device_type="cpu")
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    ptx.apply_tp(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), mp_policy=policy)
    ptx.materialize(model, "cpu", seed=0)
    seen = set()
    for module in model.modules():  # what really runs
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, _, out: seen.add((m.weight.dtype, out.dtype)))
    got = one_step(model, lambda m: m(torch.ones(2, 8, dtype=torch.int64)).float().sum())
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    want = "float32" if reduce else "bfloat16"
    assert got == float32_everywhere(compute="bfloat16", output="bfloat16", reduce=want)


@pytest.mark.parametrize("reduce", [torch.float32, None])
@distributed(world_size=2)
def test_the_dtype_of_the_reduction_is_what_fsdp_sends(reduce):
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    model = nn.Sequential(nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), units=["0"], mp_policy=policy)
    with CollectiveLog() as log:
        got = one_step(model, lambda m: m(torch.ones(2, 4)).sum())
    (size,) = [size for name, size in log.calls if "reduce_scatter" in name]
    assert size == 20 * getattr(torch, got["precision/reduce"]).itemsize
