"""save_hf: what any mesh holds is what transformers opens, or nothing is there."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, models
from torch import nn

import harness
import ptx
from harness import distributed
from hf.folders import full, meta_model, tensors_in, write
from hf.test_load import MESHES, VARIANTS, shared_folder
from model.families import CASES, build, tokens
from ptx.hf import _save, load_hf, load_tokenizer, save_hf


@pytest.mark.parametrize("mesh", ["1", "dp_shard 4", "dp_shard 2 x tp 2", "tp 4", "HSDP 2 x 2"])
def test_C07_every_mesh_writes_what_it_was_loaded_from(mesh, tmp_path):
    for name, (family, changes) in VARIANTS.items():
        write(tmp_path / name, family, dtype=torch.bfloat16, **changes)
    size = torch.Size(MESHES[mesh].values()).numel()
    harness.run(save_from_mesh, size, MESHES[mesh], tmp_path)
    for name in VARIANTS:
        for whose in ("ptx", "transformers"):
            assert_opens(tmp_path / f"{name} of {whose}", tmp_path / name)


class NoRecords(logging.Handler):
    def emit(self, record):
        raise AssertionError(record.getMessage())


def save_from_mesh(degrees, root):
    # torch logs when it has to gather several dims one after the other
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(NoRecords())
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    for variant, (name, changes) in VARIANTS.items():
        for whose in ("ptx", "transformers"):
            model = meta_model(whose, root / variant, name, **changes)
            ptx.apply_tp(model, mesh["tp"])
            ptx.apply_ac(model, "full")
            ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
            load_hf(model, root / variant)
            path = root / f"{variant} of {whose}"
            assert save_hf(model, path, dtype=torch.bfloat16, file_bytes=60_000) == path
            assert (path / "config.json").is_file()  # as soon as any rank returns


def assert_opens(folder, source):
    """Bits, dtypes and names are those of the source, and transformers takes them all."""
    want, got = tensors_in(source), tensors_in(folder)
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    assert (
        type(model).__name__ == json.loads((source / "config.json").read_text())["architectures"][0]
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = tokens()[:, :8] % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    check_index(folder)


def check_index(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert [k for k, n in index["weight_map"].items() if n == file.name] == sorted(
                opened.keys()
            )
        total += sum(t.numel() * t.itemsize for t in tensors_in(folder).values()) // len(files)
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert header % 8 == 0
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.itemsize for t in tensors_in(folder).values()
    )


@pytest.mark.parametrize("name", CASES)
def test_C13_every_family_comes_back_bit_for_bit(name, tmp_path):
    reference = build(name)
    write(tmp_path / "in", name)
    for whose in ("ptx", "transformers"):
        model = load_hf(meta_model(whose, tmp_path / "in", name), tmp_path / "in")
        save_hf(model, tmp_path / whose)
        assert [f.name for f in (tmp_path / whose).glob("*.safetensors*")] == ["model.safetensors"]
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / whose, output_loading_info=True
        )
        assert not any(info.values()), info
        assert again.dtype == torch.float32
        with torch.no_grad():
            assert torch.equal(again(tokens()).logits, reference(tokens()).logits)
        assert ptx.ModelArgs.from_hf(tmp_path / whose) == ptx.ModelArgs.from_hf(again.config)


@distributed(world_size=2)
def test_A01_names_on_file_are_clean_however_the_model_is_wrapped():
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    args = ptx.ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=13)
    root = Path(shared_folder())
    keys = set()
    for i, (ac, compiled) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        with torch.device("meta"):
            model = ptx.Transformer(args)
        if ac:
            ptx.apply_ac(model, "full")
        if compiled:
            ptx.apply_compile(model, backend="eager")
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
        ptx.materialize(model, "cpu", seed=0)
        path = save_hf(model, root / str(i))
        dist.barrier()
        got = tensors_in(path)
        keys.add(tuple(sorted(got)))
        if i == 0:
            want = got
        assert all(torch.equal(got[key], want[key]) for key in want)
        load_hf(model, path)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    ptx.materialize(model := meta_of(args), "cpu", seed=0)
    for key in "01":  # by hand, prefixes and all
        model.layers[key] = torch.compile(checkpoint_wrapper(model.layers[key]), backend="eager")
    path = save_hf(model, root / f"by hand {dist.get_rank()}")
    keys.add(tuple(sorted(tensors_in(path))))
    assert len(keys) == 1
    assert "model.layers.0.self_attn.q_proj.weight" in keys.pop()
    load_hf(model, path)


def meta_of(args):
    with torch.device("meta"):
        return ptx.Transformer(args)


def test_C08_a_tied_head_is_written_once(tmp_path):
    write(tmp_path / "in", "tied")
    for whose in ("ptx", "transformers"):
        model = load_hf(meta_model(whose, tmp_path / "in", "tied"), tmp_path / "in")
        folder = save_hf(model, tmp_path / whose, file_bytes=20_000)
        assert "lm_head.weight" not in tensors_in(folder)
        assert "lm_head.weight" not in (folder / "model.safetensors.index.json").read_text()
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    # What the model is decides, not what its configuration says.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    folder = save_hf(model, tmp_path / "untied")
    assert "lm_head.weight" in tensors_in(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    untied = save_hf(load_hf(meta_of(ptx.ModelArgs.from_hf(folder)), folder), tmp_path / "ours")
    assert torch.equal(tensors_in(untied)["lm_head.weight"], model.lm_head.weight)


def test_M11_padded_rows_are_cut(tmp_path):
    write(tmp_path / "in", "tied", vocab_size=61)
    harness.run(save_padded, 4, tmp_path)
    want = tensors_in(tmp_path / "in")
    got = tensors_in(tmp_path / "out")
    assert got["model.embed_tokens.weight"].shape == (61, 64)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 61
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def save_padded(root):
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = meta_of(replace(ptx.ModelArgs.from_hf(root / "in"), vocab_size=128))
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    load_hf(model, root / "in", vocab_size=61)
    save_hf(model, root / "out", vocab_size=61)


@distributed(world_size=4)
def test_the_ranks_share_the_writing():
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = meta_of(ptx.ModelArgs(dim=32, n_layers=4, n_heads=4, vocab_size=64))
    ptx.apply_tp(model, mesh["tp"])
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    written = []
    write_file = _save.write_file

    def noted(file, *args):
        written.append(file.name)
        write_file(file, *args)

    _save.write_file = noted
    path = save_hf(model, Path(shared_folder()) / "model", file_bytes=40_000)
    assert written
    counts = [None] * 4
    dist.all_gather_object(counts, len(written))
    assert sum(counts) == len(list(path.glob("*.safetensors")))
    assert max(counts) - min(counts) <= 1


@distributed(world_size=4)
def test_every_placement_is_gathered_right():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")["dp_shard", "tp"]
    torch.manual_seed(0)
    kinds = [Shard(0), Shard(1), Replicate()]
    for shape in ((7, 5), (3, 1), (8, 4)):
        whole = torch.randn(shape)
        for first in kinds:
            for second in kinds:
                tensor = distribute_tensor(whole, mesh, [first, second])
                assert torch.equal(_save._gathered(tensor), whole), (shape, first, second)


@distributed(world_size=4)
def test_stages_of_a_pipeline_make_one_folder():
    mesh = ptx.build_mesh(pp=2, dp_shard=2, device_type="cpu")
    root = Path(shared_folder())
    args = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=30)
    whole = ptx.materialize(meta_of(args), "cpu", seed=0)
    stage = mesh["pp"].get_local_rank()
    part = meta_of(args)
    del part.layers[str(1 - stage)]
    if stage:
        part.tok_embeddings = None
    else:
        part.norm = part.output = None
    ptx.apply_fsdp2(part, ptx.fsdp_mesh(mesh), units=["layers.*"])
    ptx.materialize(part, "cpu", seed=0)
    path = save_hf([part], root / "model")
    check_index(path)
    again = load_hf(meta_of(args), path)
    for (name, got), want in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want), name
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    load_hf([part], path)
    for name, got in part.named_parameters():
        assert torch.equal(full(got), whole.get_parameter(name)), name


# Tokenizers and configuration


def test_tokenizer_files_and_special_tokens_go_along(tmp_path):
    write(tmp_path / "in", "llama2")
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.save(str(tmp_path / "in/tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "in/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "in/generation_config.json").write_text('{"temperature": 0.5}')
    model = load_hf(meta_model("ptx", tmp_path / "in", "llama2"), tmp_path / "in")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    kinds = {
        "folder": tmp_path / "in",
        "str": str(tmp_path / "in"),
        "file": tmp_path / "in/tokenizer.json",
        "loaded": load_tokenizer(tmp_path / "in"),
        "transformers": theirs,
        "tokenizers": tokenizer,
    }
    for kind, given in kinds.items():
        folder = save_hf(model, tmp_path / kind, tokenizer=given)
        again = load_tokenizer(folder)
        assert again.encode("a") == [2], kind
        if kind in ("folder", "str", "loaded"):
            written = json.loads((folder / "config.json").read_text())
            assert (written["bos_token_id"], written["eos_token_id"]) == (0, 1)
            assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5
        if kind != "file":
            assert transformers.AutoTokenizer.from_pretrained(folder)("a").input_ids == [2]
    for wrong in (tmp_path, tmp_path / "absent", 3):
        with pytest.raises(ValueError, match="save_hf: tokenizer"):
            save_hf(model, tmp_path / "wrong", tokenizer=wrong)
    assert not (tmp_path / "wrong").exists()


# Refusals


def test_what_cannot_be_saved(tmp_path):
    args = ptx.ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=13)
    with pytest.raises(
        ValueError, match=r"save_hf: \d+ tensors are on meta, tok_embeddings.weight"
    ):
        save_hf(meta_of(args), tmp_path / "a")
    model = ptx.Transformer(args)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    (tmp_path / "file").touch()
    for path in ("full", "file"):
        with pytest.raises(ValueError, match="exists; choose a new folder"):
            save_hf(model, tmp_path / path)
    with pytest.raises(ValueError, match="vocab_size=14, but the model has"):
        save_hf(model, tmp_path / "a", vocab_size=14)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 can't hold weights"):
        save_hf(model, tmp_path / "a", dtype=torch.int8)
    with pytest.raises(ValueError, match="Linear has no configuration"):
        save_hf(nn.Linear(2, 2), tmp_path / "a")
    odd = ptx.Transformer(replace(args, qk_norm=True, mlp_bias=True))
    with pytest.raises(ValueError, match=r"save_hf: hf_config: no model of .* mlp_bias=True"):
        save_hf(odd, tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    save_hf(model, tmp_path / "empty")
    assert (tmp_path / "empty/model.safetensors").is_file()


@distributed(world_size=4)
def test_nothing_is_left_when_a_rank_cannot_write():
    mesh = ptx.build_mesh(dp_shard=4, device_type="cpu")
    model = meta_of(ptx.ModelArgs(dim=32, n_layers=4, n_heads=4, vocab_size=64))
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    ptx.materialize(model, "cpu", seed=0)
    root = Path(shared_folder())
    write_file = _save.write_file

    def full_disk(file, pieces, tensors):
        if dist.get_rank() == 2:
            next(tensors)
            raise OSError(28, "No space left on device")
        write_file(file, pieces, tensors)

    _save.write_file = full_disk
    with pytest.raises(ValueError, match=r"save_hf: .*No space left on device"):
        save_hf(model, root / "model", file_bytes=20_000)
    dist.barrier()
    assert os.listdir(root) == []
    _save.write_file = write_file
    commit = _save.commit

    def no_rename(draft, path):
        raise OSError(5, "Input/output error")

    _save.commit = no_rename
    with pytest.raises(ValueError, match=r"save_hf: .*Input/output error"):
        save_hf(model, root / "model")
    dist.barrier()
    assert os.listdir(root) == []
    _save.commit = commit
    save_hf(model, root / "model", file_bytes=20_000)
    mine = root / "model" if dist.get_rank() else root / "other"
    with pytest.raises(ValueError, match="exists; choose a new folder"):
        save_hf(model, mine)
    dist.barrier()
    assert os.listdir(root) == ["model"]


def test_a_killed_save_leaves_no_folder_of_that_name(tmp_path):
    """The draft may stay; what is under the name is whole."""
    model = ptx.Transformer(ptx.ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=13))
    pid = os.fork()
    if pid == 0:
        _save.commit = lambda draft, path: os._exit(9)
        save_hf(model, tmp_path / "model")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "model").exists()
    save_hf(model, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").is_file()
