import copy
import functools
import io
import pickle
import types

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import SelectivePolicy, apply_ac
from ptx.parallel._compile import apply_compile

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=11, multiple_of=8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(self.inner(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def skip(self, x):
    return x + self.outer(self.inner(x).tanh())


REPLACED = {
    "a method": lambda block: types.MethodType(skip, block),
    "a partial": lambda block: functools.partial(skip, block),
}
LAYERS = {
    "AC": lambda model: apply_ac(model, "full"),
    "compile": lambda model: apply_compile(model, backend="eager"),
    "both": lambda model: apply_ac(apply_compile(model, backend="eager"), "selective"),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", REPLACED)
def test_a_copy_computes_with_its_own_weights_when_its_forward_was_replaced(kind, layers):
    torch._dynamo.reset()
    model, x = Stack(), torch.randn(2, 4)
    for block in model.layers:
        block.forward = REPLACED[kind](block)
    want = model(x)
    LAYERS[layers](model)
    twice = copy.deepcopy(copy.deepcopy(model))
    torch.testing.assert_close(model(x), want)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    got = twice(x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twice.parameters())


def recomputations(model):
    calls = []
    handle = model.layers["0"].ffn_norm.register_forward_hook(lambda *_: calls.append(1))
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    handle.remove()
    return len(calls) - 1


@pytest.mark.parametrize("mode", ["full", "selective", lambda *_, **__: None])
def test_a_model_is_saved_without_its_layers_and_takes_them_again(mode):
    model = apply_compile(apply_ac(Transformer(ARGS), mode), backend="eager")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert recomputations(loaded) == 0
    apply_ac(loaded, "full")
    assert recomputations(loaded) == 1
    copied = pickle.loads(pickle.dumps(loaded))
    assert recomputations(apply_ac(copied, SelectivePolicy())) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(copied.get_parameter(name), parameter)


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}
    return LlamaForCausalLM(LlamaConfig(intermediate_size=24, **sizes))


def test_what_torch_or_transformers_wrapped_already_is_refused():
    wrapped = Stack()
    wrapped.layers[1] = checkpoint_wrapper(wrapped.layers[1])
    with pytest.raises(ValueError) as error:
        apply_ac(wrapped, "full")
    assert str(error.value) == (
        "apply_ac: 'layers.1': 'layers.1' is recomputed by torch's checkpoint_wrapper already;"
        " leave out one of the two"
    )
    wrapped = Stack()
    wrapped.layers[0].inner = checkpoint_wrapper(wrapped.layers[0].inner)
    with pytest.raises(ValueError, match=r"'layers.0': 'layers.0.inner' is recomputed by torch"):
        apply_ac(wrapped, "selective", units=["layers.0"])
    apply_ac(wrapped, "full", units=["layers.1", "layers.0.outer"])

    model = llama()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"recomputed by transformers already"):
        apply_ac(model, "full")
    model.activation_checkpointing_disable()
    apply_ac(model, "full")

    compiled = Stack()
    compiled.layers[0] = torch.compile(compiled.layers[0], backend="eager")
    compiled.layers[1].compile(backend="eager")
    for number in (0, 1):
        with pytest.raises(
            ValueError, match=f"'layers.{number}' is compiled by torch.compile already"
        ):
            apply_compile(compiled)
    with pytest.raises(ValueError, match=r"'layers.0' is compiled by torch.compile, and a policy"):
        apply_ac(compiled, "selective")
    apply_ac(compiled, "full")


@pytest.mark.parametrize("apply", [lambda m: apply_ac(m, "full"), apply_compile])
def test_parts_are_given_one_by_one(apply):
    with pytest.raises(
        ValueError, match=r"must be one module, got a list; call apply_\w+ for each"
    ):
        apply([Stack(), Stack()])


def test_a_class_is_no_policy():
    with pytest.raises(ValueError, match=r"mode must be .* got <class '.*SelectivePolicy'>"):
        apply_ac(Stack(), SelectivePolicy)
