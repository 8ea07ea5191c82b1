"""load_hf: any mesh gets the bits that are on file, or every rank says why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import harness
import ptx
from harness import distributed
from hf.folders import change_config, full, meta_model, rewrite, tensors_in, write
from model.families import build, tokens
from model.test_parity import rename
from ptx.hf import _read, hf_report, load_hf

MESHES = {
    "1": {},
    "dp_shard 2": {"dp_shard": 2},
    "dp_shard 4": {"dp_shard": 4},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "HSDP 2 x 1 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
# 61 and 3 rows split unevenly, tp 4 replicates 2 kv heads, biases are split and replicated.
VARIANTS = {
    "plain": ("llama2", {"vocab_size": 61, "num_key_value_heads": 2}),
    "tied": ("tied", {"vocab_size": 3}),
    "biases": ("biases", {"vocab_size": 61}),
}


# Exactness


@pytest.mark.parametrize("mesh", MESHES)
def test_C07_every_mesh_gets_what_is_on_file(mesh, tmp_path):
    for name, (family, changes) in VARIANTS.items():
        write(tmp_path / name, family, dtype=torch.bfloat16, **changes)
    size = torch.Size(MESHES[mesh].values()).numel()
    harness.run(check_mesh, size, MESHES[mesh], tmp_path)


def check_mesh(degrees, root):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    for variant, (name, changes) in VARIANTS.items():
        folder = root / variant
        want = tensors_in(folder)
        for kind in ("ptx", "transformers"):
            for meta in (True, False) if variant == "plain" else (True,):
                model = meta_model(kind, folder, name, **changes)
                ptx.apply_tp(model, mesh["tp"])
                ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
                if not meta:
                    ptx.materialize(model, "cpu", seed=1)
                assert load_hf(model, folder) is model
                assert_holds(model, want, f"{variant}, {kind}, meta={meta}")


def assert_holds(model, want, what):
    seen = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = name if hasattr(model, "config") else unrename(model, name)
        assert parameter.dtype == torch.float32, f"{what}: {name}"
        if key not in want:
            assert key == "lm_head.weight", f"{what}: {name}"
            key = "model.embed_tokens.weight"
        assert torch.equal(full(parameter), want[key].float()), f"{what}: {name}"
        seen.add(key)
    assert seen == want.keys(), what


def unrename(model, name):
    """By the independent table of the parity tests."""
    known = {rename(key): key for key in all_keys(len(model.layers))}
    return known[name]


def all_keys(layers):
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for i in range(layers):
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{part}.weight"
        for part in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"model.layers.{i}.{part}.weight"
        for part in ("q", "k", "v", "o"):
            yield from (f"model.layers.{i}.self_attn.{part}_proj.{x}" for x in ("weight", "bias"))
        for part in ("gate", "up", "down"):
            yield from (f"model.layers.{i}.mlp.{part}_proj.{x}" for x in ("weight", "bias"))


@pytest.mark.parametrize("name", ["qwen2-upper-window", "qwen3-window", "smollm3", "llama3.1"])
def test_C05_logits_equal_transformers_after_pure_renames(name, tmp_path):
    reference = build(name)
    write(tmp_path, name)
    model = load_hf(meta_model("ptx", tmp_path, name), tmp_path)
    with torch.no_grad():
        want = reference(tokens()).logits
        torch.testing.assert_close(model(tokens()), want, atol=5e-5, rtol=0)
        # Rows in Meta's order, for which nothing but the file's author can vouch, are far off.
        for layer in model.layers.values():
            weight = layer.attention.wq.weight
            weight.copy_(weight.unflatten(0, (4, -1, 2)).transpose(1, 2).reshape(weight.shape))
        assert (model(tokens()) - want).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_dtype_on_file(dtype, tmp_path):
    write(tmp_path, "qwen3", dtype=dtype)
    model = load_hf(meta_model("ptx", tmp_path, "qwen3"), tmp_path)
    for key, want in tensors_in(tmp_path).items():
        got = model.get_parameter(rename(key))
        assert got.dtype == torch.float32
        assert torch.equal(got, want.float()), key


def test_values_that_float16_cannot_hold(tmp_path):
    write(tmp_path, "llama2", dtype=torch.bfloat16)
    model = load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path, dtype=torch.float16)
    assert model.norm.weight.dtype == torch.float16
    tensors = tensors_in(tmp_path)
    tensors["model.norm.weight"][3] = 1e5
    rewrite(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values that float16 can't"):
        load_hf(model, tmp_path)
    load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)


@distributed(world_size=4)
def test_dtype_casts_parameters_and_no_buffer():
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    folder = Path(shared_folder())
    if dist.get_rank() == 0:
        write(folder, "llama3.1", dtype=torch.float32)
    dist.barrier()
    want = tensors_in(folder)
    for dtype in (torch.bfloat16, torch.float32):
        for meta in (True, False):
            model = meta_model("transformers", folder, "llama3.1").to(torch.float16)
            ptx.apply_tp(model, mesh["tp"])
            ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
            if not meta:
                ptx.materialize(model, "cpu", seed=0)
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            load_hf(model, folder, dtype=dtype)
            for name, parameter in model.named_parameters():
                assert parameter.dtype == dtype
                assert torch.equal(full(parameter), want[name].to(dtype)), name
            assert buffers
            for name, buffer in model.named_buffers():
                assert not buffer.is_meta, name
                assert meta or torch.equal(buffer, buffers[name]), name
                assert meta or buffer.dtype == buffers[name].dtype, name
            model(tokens()[:, :8])  # FSDP knows the new dtype


def shared_folder():
    import tempfile

    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return name[0]


@distributed(world_size=4)
def test_wide_and_deep_tensors_are_read_in_blocks():
    """Shards that are columns, of 3-D tensors too, and rows longer than a block."""
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = Path(shared_folder())
    torch.manual_seed(0)
    shapes = {"a": (6, 50), "b": (5, 4, 30), "c": (3, 2, 6, 4), "d": (7,), "e": (2, 5000), "f": ()}
    whole = {key: torch.randn(shape) for key, shape in shapes.items()}
    if dist.get_rank() == 0:
        save_file(whole, folder / "model.safetensors")
    dist.barrier()
    placements = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))]
    for dims in placements:
        # Small numbers: rows longer than a block, pieces of rows, whole rows.
        for _read.BLOCK, _read._PIECE in ((64, 40), (1024, 40), (1024, 4096)):
            model = nn.Module()
            for key, value in whole.items():
                here = [d if d.dim < value.ndim else Shard(0) for d in dims] if value.ndim else []
                tensor = torch.zeros_like(value)
                if here:
                    tensor = distribute_tensor(tensor, mesh["dp_shard", "tp"], here)
                model.register_parameter(key, nn.Parameter(tensor))
            load_hf(model, folder)
            for key, value in whole.items():
                assert torch.equal(full(model.get_parameter(key)), value), (dims, key)


def test_a_rank_reads_its_own_bytes():
    harness.run(check_bytes, 4)


def check_bytes():
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    folder = Path(shared_folder())
    args = ptx.ModelArgs(
        dim=2048, n_layers=1, n_heads=16, n_kv_heads=4, hidden_dim=4096, vocab_size=64
    )
    if dist.get_rank() == 0:
        from ptx.hf._names import hf_key

        model = ptx.Transformer(args)
        named = {hf_key(name): p.detach() for name, p in model.named_parameters()}
        save_file(named, folder / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = ptx.Transformer(args)
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    readers = []
    close = _read.Reader.__exit__

    def closed(self, *args):
        readers.append(self)
        return close(self, *args)

    _read.Reader.__exit__ = closed
    report = hf_report(model, folder)
    load_hf(model, folder)
    local = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert report.bytes_to_read == local
    assert max(reader.bytes_read for reader in readers) == local


@distributed(world_size=4)
def test_two_models_on_meshes_of_their_own_load_at_once():
    """Each talks to its own ranks only; the second one is told what is wrong with its file."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    folder = Path(shared_folder())
    if dist.get_rank() == 0:
        write(folder, "llama2")
        write(folder / "other", "llama2", vocab_size=61)
    dist.barrier()
    model = meta_model("ptx", folder, "llama2")
    ptx.apply_fsdp2(model, meshes[mine])
    if mine == 0:
        load_hf(model, folder)
    else:
        with pytest.raises(ValueError, match=r"embed_tokens.weight is \[61, 64\] in the file"):
            load_hf(model, folder / "other")


def test_after_a_forward_without_a_backward_the_load_is_seen(tmp_path):
    write(tmp_path, "qwen3")
    harness.run(check_after_forward, 2, tmp_path)


def check_after_forward(folder):
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    model = meta_model("ptx", folder, "qwen3")
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    model(tokens())  # the root and the head stay gathered
    load_hf(model, folder)
    fresh = load_hf(meta_model("ptx", folder, "qwen3"), folder)
    with torch.no_grad():
        for _ in range(2):  # the second one gathers the shards
            assert torch.equal(model(tokens()), fresh(tokens()))


def test_parts_of_a_pipeline(tmp_path):
    write(tmp_path, "llama2")
    want = tensors_in(tmp_path)
    first, last = (meta_model("ptx", tmp_path, "llama2") for _ in range(2))
    for key in "23":
        del first.layers[key]
    for key in "01":
        del last.layers[key]
    first.norm = first.output = last.tok_embeddings = None
    parts = load_hf([first, last], tmp_path)
    assert_holds_parts(parts, want)
    again = meta_model("ptx", tmp_path, "llama2")
    del again.layers["3"]
    load_hf(again, tmp_path)  # a part, alone: what the others have isn't unexpected


def assert_holds_parts(parts, want):
    got = {name: p for part in parts for name, p in part.named_parameters()}
    assert got.keys() == {rename(key) for key in want}
    for key, value in want.items():
        assert torch.equal(got[rename(key)], value), key


def test_a_model_without_a_head_and_a_stranger(tmp_path):
    from transformers import LlamaConfig, LlamaModel

    write(tmp_path, "llama2")
    config = LlamaConfig.from_pretrained(tmp_path)
    body = load_hf(LlamaModel(config), tmp_path)
    want = tensors_in(tmp_path)
    assert torch.equal(body.embed_tokens.weight, want["model.embed_tokens.weight"])
    body.save_pretrained(tmp_path / "body")
    report = hf_report(build("llama2"), tmp_path / "body")
    assert report.missing == ["lm_head.weight"]

    class Stranger(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("lost", torch.ones(1), persistent=False)

    file = tmp_path / "stranger.safetensors"
    source = Stranger()
    source.norm(source.linear(torch.randn(5, 3)))
    save_file(source.state_dict(), file)
    got = load_hf(Stranger(), file)
    assert all(torch.equal(got.state_dict()[k], v) for k, v in source.state_dict().items())
    assert int(got.norm.num_batches_tracked) == 1


def test_C08_a_head_on_file_of_a_tied_model_must_be_the_embedding(tmp_path):
    write(tmp_path, "tied")
    tensors = tensors_in(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, tensors)
    model = meta_model("ptx", tmp_path, "tied")
    assert hf_report(model, tmp_path).ignored == ["lm_head.weight"]
    load_hf(model, tmp_path)
    assert torch.equal(model.output.weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    rewrite(tmp_path, tensors)
    for kind in ("ptx", "transformers"):
        with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens"):
            load_hf(meta_model(kind, tmp_path, "tied"), tmp_path)
    # An untied model from a tied file.
    del tensors["lm_head.weight"]
    rewrite(tmp_path, tensors)
    with torch.device("meta"):
        from dataclasses import replace

        untied = replace(ptx.ModelArgs.from_hf(tmp_path), tie_embeddings=False)
        model = ptx.Transformer(untied)
    with pytest.raises(ValueError, match=r"lm_head.weight \(the file ties it to the embedding"):
        load_hf(model, tmp_path)


def test_M11_padded_rows_become_zero(tmp_path):
    from dataclasses import replace

    write(tmp_path, "llama2", vocab_size=61)
    harness.run(check_padding, 4, tmp_path)
    args = replace(ptx.ModelArgs.from_hf(tmp_path), vocab_size=64)
    with torch.device("meta"):
        model = ptx.Transformer(args)
    with pytest.raises(
        ValueError, match=r"\[61, 64\] in the file, \[64, 64\].*vocab_size=61 takes"
    ):
        load_hf(model, tmp_path)
    with pytest.raises(ValueError, match=r"and vocab_size=60"):
        load_hf(model, tmp_path, vocab_size=60)


def check_padding(folder):
    from dataclasses import replace

    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    args = replace(ptx.ModelArgs.from_hf(folder), vocab_size=128)
    with torch.device("meta"):
        model = ptx.Transformer(args)
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    assert len(hf_report(model, folder, vocab_size=61).padded) == 2
    load_hf(model, folder, vocab_size=61)
    want = load_file(
        next(f for f in sorted(folder.glob("*.safetensors")) if "lm_head.weight" in load_file(f))
    )
    head = full(model.output.weight)
    assert torch.equal(head[:61], want["lm_head.weight"])
    assert not head[61:].any()
    assert not full(model.tok_embeddings.weight)[61:].any()


# Refusals


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path):
    write(tmp_path, "llama2")
    tensors = tensors_in(tmp_path)
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int64)
    tensors["model.layers.4.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    rewrite(tmp_path, tensors)
    for kind in ("ptx", "transformers"):
        harness.run(check_refusal, 4, kind, tmp_path)


def check_refusal(kind, folder):
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    for meta in (True, False):
        model = meta_model(kind, folder, "llama2")
        ptx.apply_tp(model, mesh["tp"])
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
        if not meta:
            ptx.materialize(model, "cpu", seed=0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"load_hf: .* doesn't fit the model") as error:
            load_hf(model, folder)
        for line in (
            "2 missing in the file: ",
            "1 in the file that the model doesn't have: model.layers.4.self_attn.q_proj.weight",
            "2 don't fit: model.layers.1.",
            "model.layers.1.mlp.up_proj.weight is [95, 64] in the file, [96, 64] in the model",
            "input_layernorm.weight is torch.int64 in the file, torch.float32 in the model",
        ):
            assert line in str(error.value), line
        assert "inv_freq" not in str(error.value)
        assert all(p.is_meta == meta for p in model.parameters())
        if not meta:
            for name, p in model.named_parameters():
                assert torch.equal(p.to_local(), before[name].to_local()), name


@distributed(world_size=2)
def test_every_rank_raises_what_one_sees():
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    folder = Path(shared_folder())
    if dist.get_rank() == 0:
        write(folder, "llama2")
        write(folder / "other", "llama2", vocab_size=61)
    dist.barrier()
    model = meta_model("ptx", folder, "llama2")
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    mine = folder if dist.get_rank() == 0 else folder / "absent"
    with pytest.raises(ValueError, match=r"absent' doesn't exist, and is no repository"):
        load_hf(model, mine)
    mine = folder if dist.get_rank() == 0 else folder / "other"
    with pytest.raises(ValueError, match="holds other tensors for some ranks"):
        load_hf(model, mine)
    if dist.get_rank() == 1:  # a disk that fails in the middle

        def broken(self, view, start, file):
            raise OSError(5, "Input/output error")

        _read.Reader._read_into = broken
    with pytest.raises(ValueError, match=r"reading .* failed: .*Input/output error"):
        load_hf(model, folder)


def test_broken_files(tmp_path):
    write(tmp_path, "llama2")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    good = file.read_bytes()
    length = int.from_bytes(good[:8], "little")

    def message(content):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"^load_hf: ") as error:
            load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)
        assert file.name in str(error.value)
        return str(error.value)

    def with_header(change):
        header = json.loads(good[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    key = next(k for k in json.loads(good[8 : 8 + length]) if k != "__metadata__")
    assert "a broken download?" in message(good[:-1])
    assert "a broken download?" in message(good + b"\0")
    assert "doesn't fit into 0" in message(b"")
    assert "doesn't fit into" in message(b"\xff" * 100)
    assert "doesn't fit into" in message((2**40).to_bytes(8, "little") + good[8:])
    assert "not a whole" in message(good[: 8 + length - 3])
    assert "no JSON object" in message((2).to_bytes(8, "little") + b"[]")
    for change, said in (
        (lambda h: h[key].update(dtype="F4"), "has no dtype of"),
        (lambda h: h[key].update(shape=[-1]), "without a shape"),
        (lambda h: h[key].update(shape=[True]), "without a shape"),
        (lambda h: h[key].update(shape=[1]), "this shape takes 4 bytes"),
        (lambda h: h[key].update(data_offsets=[0]), "without a shape and two offsets"),
        (lambda h: h.pop(key), "begin at"),
        (lambda h: h.update({key: 3}), "has no dtype"),
    ):
        assert said in message(with_header(change)), said
    file.write_bytes(good)
    load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"lacks {file.name}, which its index names"):
        load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)


def test_broken_indexes(tmp_path):
    write(tmp_path, "llama2")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def message(content):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"^load_hf: ") as error:
            load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)
        return str(error.value)

    places = good["weight_map"]
    assert "no weight_map" in message({})
    assert "outside of its folder" in message({"weight_map": places | {"x": "../a.safetensors"}})
    first, last = min(places.values()), max(places.values())
    assert "names what isn't there: x in" in message({"weight_map": places | {"x": first}})
    moved = next(key for key, name in places.items() if name == first)
    assert f"isn't there: {moved}" in message({"weight_map": places | {moved: last}})
    index.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load_hf(meta_model("ptx", tmp_path, "llama2"), tmp_path)


def test_folders_without_safetensors(tmp_path):
    model = build("llama2")
    with pytest.raises(ValueError, match=r"no model.safetensors and no .*index.json; save the"):
        load_hf(model, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pytorch_model.bin"):
        load_hf(model, tmp_path)
    write(tmp_path / "quantised", "llama2")
    change_config(tmp_path / "quantised", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantization_config={'quant_method': 'fp8'}"):
        load_hf(model, tmp_path / "quantised")
    with pytest.raises(ValueError, match="is local, and revision='main'"):
        load_hf(model, tmp_path / "quantised", revision="main")
    tensors = tensors_in(tmp_path / "quantised")
    shutil.rmtree(tmp_path / "quantised")
    write(tmp_path / "quantised", "llama2")
    rewrite(tmp_path / "quantised", {k: v.to(torch.float8_e4m3fn) for k, v in tensors.items()})
    with pytest.raises(ValueError, match=r"is torch.float8_e4m3fn in the file"):
        load_hf(model, tmp_path / "quantised")


def test_a_report_loads_nothing_and_prints(tmp_path):
    write(tmp_path, "llama2", dtype=torch.bfloat16)
    model = meta_model("ptx", tmp_path, "llama2")
    report = hf_report(model, tmp_path)
    assert report.problems == []
    assert all(p.is_meta for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert report.dtypes == {"bfloat16": count}
    assert report.bytes_to_read == 2 * count
    assert str(report) == f"{tmp_path}: {count:,} bfloat16; {2 * count:,} bytes for this rank"
    del model.layers["0"]
    model.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"extra.weight is no parameter of ptx.Transformer"):
        hf_report(model, tmp_path)


def test_the_private_names_of_torch_are_there():
    """What has no public name; torch 2.13."""
    dist.init_process_group("fake", rank=0, world_size=4, store=_fake_store())
    try:
        mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
        assert mesh["tp"]._get_root_mesh() is mesh
        tensor = DTensor.from_local(torch.zeros(2), mesh["tp"])
        assert tensor.__create_chunk_list__()
    finally:
        dist.destroy_process_group()


def _fake_store():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
