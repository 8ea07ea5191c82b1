"""Counts of whole tensors, whatever shards them."""

import json
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ptx
from harness import distributed
from histograms import Activations, histograms, model_tensors, write_histograms

TINY = ptx.ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=8)


def test_as_torch_counts():
    torch.manual_seed(0)
    tensor = torch.randn(1000)
    (got,) = histograms({"x": tensor}, bins=16).values()
    assert (got.low, got.high) == (tensor.min().item(), tensor.max().item())
    want = torch.histc(tensor, 16, tensor.min(), tensor.max())
    # A value on an edge may fall to either side.
    assert (torch.tensor(got.counts) - want).abs().sum() <= 2
    assert sum(got.counts) == 1000
    assert got.nonfinite == 0


def test_values_that_are_all_alike_empty_or_not_finite(tmp_path):
    odd = torch.tensor([math.nan, 1.0, math.inf, 3.0, -math.inf])
    got = histograms({"zeros": torch.zeros(5), "none": torch.zeros(0), "odd": odd}, bins=2)
    assert vars(got["zeros"]) == {"low": 0, "high": 0, "counts": [5, 0], "nonfinite": 0}
    assert got["none"].counts == [0, 0]
    assert vars(got["odd"]) == {"low": 1, "high": 3, "counts": [1, 1], "nonfinite": 3}
    path = tmp_path / "histograms.jsonl"
    write_histograms(path, 7, got)
    write_histograms(path, 8, got)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[2]["name"] == "odd"
    assert [line["step"] for line in lines] == [7] * 3 + [8] * 3


@distributed(world_size=4)
def test_shards_count_once_and_partial_ones_as_their_sum():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = torch.randn(7, 3)  # over 4 ranks: 2, 2, 2, 1
    want = histograms({"x": whole}, bins=8)["x"]
    tensors = {
        "1-D": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)]),
        "plain": whole,
        "2-D": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "few rows": distribute_tensor(whole[:1], init_device_mesh("cpu", (4,)), [Shard(0)]),
        "replicas": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
        "partial": DTensor.from_local(whole / 2, mesh, [Partial(), Replicate()]),
    }
    got = histograms(tensors, bins=8)
    assert list(got) == list(tensors)
    few = histograms({"x": whole[:1]}, bins=8)["x"]
    for name, histogram in got.items():
        assert histogram == (few if name == "few rows" else want), name
    mine = whole.tensor_split(4)[mesh.get_rank()]
    spread = histograms({"x": mine}, bins=8, spread=[mesh["a"], mesh["b"]])
    assert spread["x"] == want


def one_step(mesh, tokens):
    with torch.device("meta"):
        model = ptx.Transformer(TINY)
    if mesh is not None:
        ptx.apply_tp(model, mesh["tp"])
    ptx.apply_ac(model, "full")
    if mesh is not None:
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    activations = Activations(model)
    activations.on = True
    hidden = model(tokens, return_hidden=True)
    hidden.float().square().mean().backward()
    return model, activations


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}])
@distributed(world_size=2)
def test_a_models_parameters_gradients_and_activations(degrees):
    tokens = torch.arange(32).view(4, 8)
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    data = ptx.data_mesh(mesh)
    mine = tokens.chunk(data.size())[data.get_local_rank()]
    got, want = {}, {}
    for found, part, on in ((got, mine, mesh), (want, tokens, None)):
        model, activations = one_step(on, part)
        found |= histograms(model_tensors(model, only=["layers.1", "norm"]), bins=8)
        spread = [ptx.loss_mesh(mesh), mesh["tp"]] if on else []
        found |= histograms(activations.take(), bins=8, spread=spread)
        activations.close()
    assert list(got) == list(want)
    assert {"param/norm.weight", "grad/norm.weight", "activation/layers.0"} <= set(got)
    assert not any("layers.0" in name for name in got if not name.startswith("activation"))
    for name, histogram in got.items():
        close = pytest.approx(want[name].high, rel=1e-3, abs=1e-6)
        assert histogram.high == close, name
        assert sum(histogram.counts) == sum(want[name].counts), name
        moved = sum(abs(a - b) for a, b in zip(histogram.counts, want[name].counts))
        assert moved <= 0.02 * sum(histogram.counts) + 2, name
