import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ptx.model import ModelArgs, Transformer
from ptx.parallel._blocks import find_blocks, resolve_units


class Block(nn.Module):
    def __init__(self, *children: nn.Module):
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.mlp = nn.ModuleList(children or [nn.Linear(4, 4)])


class CrossBlock(Block):
    pass


class Model(nn.Module):
    """A module with the children given by name."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Stage(Model):
    pass


def blocks(n, kind=Block):
    return nn.ModuleList(kind() for _ in range(n))


def own(n_layers=2):
    return Transformer(ModelArgs(dim=8, n_layers=n_layers, n_heads=2, hidden_dim=8, vocab_size=5))


SMALL = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=8))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_head=2, n_layer=2, **ends))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8)
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    )


FOUND = {
    "own": (own, ["layers.0", "layers.1"]),
    "own, one layer": (lambda: own(1), ["layers.0"]),
    "Llama": (llama, ["model.layers.0", "model.layers.1"]),
    "GPT-2": (gpt2, ["transformer.h.0", "transformer.h.1"]),
    "ViT": (vit, ["vit.layers.0", "vit.layers.1"]),
    "T5, both stacks": (
        t5,
        [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in (0, 1)],
    ),
    "experts are no blocks": (
        lambda: Model(layers=nn.ModuleList(Block(Block(), Block(), Block()) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "experts of the only layer": (
        lambda: Model(layers=nn.ModuleList([Block(Block(), Block(), Block())])),
        ["layers.0"],
    ),
    "stages, not the blocks in them": (
        lambda: Model(stages=nn.ModuleList(Stage(blocks=blocks(2)) for _ in range(2))),
        ["stages.0", "stages.1"],
    ),
    "ResNet: stacks of one class side by side": (
        lambda: Model(
            layer1=nn.Sequential(Block(), Block()), layer2=nn.Sequential(Block(), Block())
        ),
        ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    ),
    "lists of lists": (
        lambda: Model(block=nn.ModuleList([blocks(2), blocks(1)])),
        ["block.0.0", "block.0.1", "block.1.0"],
    ),
    "Sequential with layers around the blocks": (
        lambda: nn.Sequential(nn.Embedding(5, 4), Block(), Block(), nn.Linear(4, 5)),
        ["1", "2"],
    ),
    "hybrid of two kinds, each repeated": (
        lambda: Model(layers=nn.ModuleList([Block(), CrossBlock(), Block(), CrossBlock()])),
        ["layers.0", "layers.1", "layers.2", "layers.3"],
    ),
    "dict, deep down": (
        lambda: Model(net=Model(body=Model(h=nn.ModuleDict({"a": Block(), "b": Block()})))),
        ["net.body.h.a", "net.body.h.b"],
    ),
    "two towers of different classes": (
        lambda: Model(vision=Model(layers=blocks(2)), text=Model(layers=blocks(2, CrossBlock))),
        ["vision.layers.0", "vision.layers.1", "text.layers.0", "text.layers.1"],
    ),
    "one module used three times": (
        lambda: Model(layers=nn.ModuleList([Block()] * 3)),
        ["layers.0"],
    ),
    "partly wrapped": (
        lambda: Model(layers=nn.ModuleList([checkpoint_wrapper(Block()), Block()])),
        ["layers.0", "layers.1"],
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FOUND)
def test_finds(name):
    build, want = FOUND[name]
    with torch.device("meta"):
        assert find_blocks(build()) == want


REFUSED = {
    "an MLP": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        r"Sequential has no list of repeated blocks .*units=\['encoder.\*'\], or units=\[\]",
    ),
    "single layers": (
        lambda: Model(layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])),
        "has no list of repeated blocks",
    ),
    "one of each": (
        lambda: Model(parts=nn.ModuleList([Block(), CrossBlock()])),
        r"'parts.\*' \(1 Block, 1 CrossBlock\) don't repeat a class; name them",
    ),
    "blocks and heads side by side": (
        lambda: Model(layers=blocks(3), heads=blocks(2, CrossBlock)),
        r"isn't clear .*'layers.\*' \(3 Block\), 'heads.\*' \(2 CrossBlock\); name them:"
        r" units=\['layers.\*', 'heads.\*'\]",
    ),
    "U-Net": (
        lambda: Model(down=blocks(2), middle=Block(), up=blocks(2, CrossBlock)),
        r"units=\['down.\*', 'up.\*'\]",
    ),
    "experts in a list of unlike layers": (
        lambda: Model(
            layers=nn.ModuleList([Block(Block(), Block()), CrossBlock(Block(), Block())])
        ),
        r"isn't clear .*units=\['layers.\*'\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"find_blocks: .*{message}"):
        find_blocks(build())


def test_units_are_groups_in_the_order_given():
    model = own()
    assert resolve_units(model, None, where="f") == [["layers.0"], ["layers.1"]]
    units = [["norm", "output"], "layers.*", ["layers.*.attention"]]
    assert resolve_units(model, units, where="f") == [
        ["norm", "output"],
        ["layers.0"],
        ["layers.1"],
        ["layers.0.attention", "layers.1.attention"],
    ]
    assert resolve_units(model, [], where="f") == []


def test_wrong_units_are_listed_at_once():
    units = ["layer.*", "layers", "norm", "norm", ["layers.0", "layers.*.attention"], []]
    with pytest.raises(ValueError) as caught:
        resolve_units(own(), units, where="apply_ac")
    assert str(caught.value) == (
        "apply_ac: 'layer.*' matches nothing; closest: 'layers.*'; 'layers' is a ModuleDict, never"
        " called itself; write 'layers.*'; 'norm' is named twice, by 'norm'; 'layers.0.attention'"
        " is inside 'layers.0' of the same unit; leave it out; an empty list is no unit"
    )
    with pytest.raises(ValueError, match=r"got 'layers.\*'; write \['layers.\*'\]"):
        resolve_units(own(), "layers.*", where="apply_ac")
    with pytest.raises(ValueError, match=r"named twice, by 'layers.\*' and 'layers.1'"):
        resolve_units(own(), ["layers.*", "layers.1"], where="apply_ac")


def test_units_are_names():
    model = own()
    for units, message in (
        ([model.layers["0"]], "units are names, not TransformerBlock; write 'layers.0'"),
        ([["norm", model.output]], "units are names, not Linear; write 'output'"),
        ([nn.Linear(2, 2), "nom"], "not Linear; pass the names of submodules; 'nom' matches"),
        ([model.layers], "units are names, not ModuleDict; write 'layers'"),
        ([3], "units are names, not int; pass the names"),
        (model.layers, "units must be a list of names, got ModuleDict; see find_blocks"),
        (3, "units must be a list of names, got int"),
    ):
        with pytest.raises(ValueError, match=f"apply_ac: .*{message}"):
            resolve_units(model, units, where="apply_ac")


def test_lists_of_parameters_are_no_units():
    model = Model(layers=blocks(2), scales=nn.ParameterList([nn.Parameter(torch.ones(2))]))
    model.tables = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})
    for name, kind in (("scales", "ParameterList"), ("tables", "ParameterDict")):
        message = f"'{name}' is a {kind}, never called itself; name the module that uses it"
        with pytest.raises(ValueError, match=message):
            resolve_units(model, [name], where="apply_ac")
