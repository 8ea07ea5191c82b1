"""Row orders of q and k: conversion of whole files, and never of shards."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import harness
import ptx
from hf.folders import full, tensors_in
from ptx.hf import convert_interleaved, half_split_rows, interleaved_rows, load_hf
from ptx.hf._names import hf_key

# 3 heads that 2 ranks can't divide, 2 kv heads over 4 ranks, and a head of 8.
MODELS = {
    "3 heads": ptx.ModelArgs(dim=24, n_layers=2, n_heads=3, vocab_size=13, qkv_bias=True),
    "2 kv heads": ptx.ModelArgs(
        dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=13, tie_embeddings=True
    ),
}


def test_C05_rows_of_each_head_evens_first():
    rows = torch.arange(16)
    got = half_split_rows(rows, heads=2)
    assert got.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(interleaved_rows(got, heads=2), rows)
    assert not torch.equal(half_split_rows(got, heads=2), rows)  # twice isn't back, from 8 on
    weight = torch.randn(24, 5)
    assert torch.equal(interleaved_rows(half_split_rows(weight, 3), 3), weight)


def test_C05_a_converted_file_computes_what_the_interleaved_model_does(tmp_path):
    for name, args in MODELS.items():
        model, file = interleaved_file(args, tmp_path / name)
        folder = convert_interleaved(file, tmp_path / f"{name}.hf", args)
        loaded = load_hf(on_meta(args), folder)
        tokens = torch.randint(13, (2, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            # The interleaved model: its own rotation of neighbours.
            want = with_rotated_neighbours(model)(tokens)
            torch.testing.assert_close(loaded(tokens), want, atol=1e-5, rtol=1e-5)
            assert (model(tokens) - want)[:, 5:].abs().max() > 0.1  # the rows as they are


def test_C07_every_mesh_loads_the_single_conversion(tmp_path):
    for name, args in MODELS.items():
        _, file = interleaved_file(args, tmp_path / name)
        convert_interleaved(file, tmp_path / f"{name}.hf", args)
    harness.run(check_fsdp, 2, tmp_path, "3 heads", {"dp_shard": 2})
    harness.run(check_fsdp, 4, tmp_path, "2 kv heads", {"dp_shard": 4})
    harness.run(check_fsdp, 4, tmp_path, "2 kv heads", {"dp_shard": 2, "tp": 2})


def check_fsdp(root, name, degrees):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    model = on_meta(MODELS[name])
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    load_hf(model, root / f"{name}.hf")
    original = torch.load(root / name / "plain.pt")
    for key, parameter in model.named_parameters():
        want = original[key]
        for projection, heads in (("wq", model.args.n_heads), ("wk", model.args.kv_heads)):
            if f".{projection}." in key:
                want = half_split_rows(want, heads)
        assert torch.equal(full(parameter), want), key


def test_a_slice_with_the_heads_of_the_whole_is_wrong():
    """What permuting shards would do, and why only files are converted."""
    whole = torch.arange(16 * 3).view(16, 3)
    mine = half_split_rows(whole, 4)[:8]
    assert not torch.equal(half_split_rows(whole[:8], 4), mine)
    assert torch.equal(half_split_rows(whole[:8], 2), mine)


def test_pickled_files_dtypes_and_several_files(tmp_path):
    args = MODELS["3 heads"]
    _, file = interleaved_file(args, tmp_path / "a")
    torch.save(
        {**torch.load(tmp_path / "a/plain.pt"), "rope.freqs": torch.ones(4)}, tmp_path / "c.pth"
    )
    first = convert_interleaved(file, tmp_path / "one", args)
    second = convert_interleaved(
        tmp_path / "c.pth", tmp_path / "two", args, dtype=torch.bfloat16, file_bytes=3000
    )
    assert len(list(second.glob("*.safetensors"))) > 2
    for key, value in tensors_in(first).items():
        assert torch.equal(tensors_in(second)[key], value.bfloat16()), key
    assert json.loads((second / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_files_of_other_models_are_refused(tmp_path):
    args = MODELS["3 heads"]
    _, file = interleaved_file(args, tmp_path / "a")
    other = ptx.ModelArgs(dim=24, n_layers=1, n_heads=3, n_kv_heads=1, vocab_size=13, o_bias=True)
    with pytest.raises(ValueError, match="isn't a whole model with these arguments") as error:
        convert_interleaved(file, tmp_path / "b", other)
    for line in (
        "- layers.0.attention.wo.bias is missing",
        "- layers.1.attention.wq.weight is unknown",
        "- layers.0.attention.wk.weight is [24, 24], not [8, 24]",
    ):
        assert line in str(error.value)
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="exists; choose a new folder"):
        convert_interleaved(file, tmp_path / "a", args)


def on_meta(args):
    with torch.device("meta"):
        return ptx.Transformer(args)


def interleaved_file(args, folder):
    """A model, whose q and k rows we take for interleaved, in Meta's names."""
    folder.mkdir()
    torch.manual_seed(0)
    model = ptx.Transformer(args)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, float("norm" in name), 0.3)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(hf_key(name) for name in tensors)
    save_file(tensors, folder / "consolidated.safetensors")
    torch.save(tensors, folder / "plain.pt")
    return model, folder / "consolidated.safetensors"


def with_rotated_neighbours(model):
    """The same model with RoPE as Meta wrote it: complex numbers made of neighbours."""
    from ptx.model import _attention

    def rotate(x, rope):
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.complex(rope.cos, rope.sin).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2)

    def forward(*args, **kwargs):
        plain, _attention.apply_rope = _attention.apply_rope, rotate
        try:
            return model(*args, **kwargs)
        finally:
            _attention.apply_rope = plain

    return forward
