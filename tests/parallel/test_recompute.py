import collections
import copy
import dataclasses
import random
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import apply_ac
from ptx.parallel._compile import apply_compile

UNITS = ["layers.*"]


class Stack(nn.Module):
    """Blocks of one class, with 8 features."""

    def __init__(self, block, n=2):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(n))

    def forward(self, x, *args, **kwargs):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)


class BatchNorm(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.outer(self.norm(self.inner(x)).relu())


class Uncounted(Block):
    """The kernel changes the statistics, and nothing tells so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        x = self.inner(x) - self.mean
        return self.outer(F.batch_norm(x, self.mean, self.var, training=True).tanh())


class Average(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.scale.lerp_(x.abs().mean(), 0.1)
        return self.outer(self.inner(x / self.scale).tanh())


class Rebound(Average):
    def forward(self, x):
        self.scale = self.scale.lerp(x.detach().abs().mean(), 0.1)
        return self.outer(self.inner(x / self.scale).tanh())


class SpectralNorm(Block):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.inner)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())


class Routed(Block):
    """Two experts; a bias that evens their load is part of the choice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x):
        scores = x[:, :2].sigmoid()
        chosen = F.one_hot((scores + self.bias).argmax(-1), 2).float()
        with torch.no_grad():
            self.bias += 0.5 * (0.5 - chosen.mean(0)).sign()
        both = torch.stack((self.inner(x).tanh(), self.outer(x).tanh()), -1)
        return (both * (scores * chosen)[:, None]).sum(-1)


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.last = None

    def forward(self, x):
        self.calls += 1
        last, self.last = self.last, x.detach()
        if last is not None:
            x = x + last
        return self.outer(self.inner(x).tanh()) * self.calls


class Lazy(Block):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs().mean())
            x = x.sin()
        return self.outer(self.inner(x / self.scale).tanh())


STATEFUL = [BatchNorm, Uncounted, Average, Rebound, SpectralNorm, Routed, Counts, Lazy]


def train(model, *, steps=2, micro_batches=1, seed=0):
    """Gradients and buffers after some steps; with several micro-batches all forwards come first."""
    torch.manual_seed(seed)
    for _ in range(steps):
        model.zero_grad()
        losses = [model(torch.randn(6, 8)).square().mean() for _ in range(micro_batches)]
        for loss in losses:
            loss.backward()
    state = {f"grad {name}": p.grad for name, p in model.named_parameters()}
    return state | {name: b.clone() for name, b in model.named_buffers()}


def assert_equal(got, want, exactly=True):
    assert got.keys() == want.keys()
    for name, value in want.items():
        difference = (got[name] - value).abs().max()
        assert difference <= (0 if exactly else 1e-5 * value.abs().max()), (name, difference)


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def build(block):
    torch.manual_seed(7)
    return Stack(block)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("block", STATEFUL)
def test_state_that_a_forward_changes_is_changed_once_and_recomputed_from_what_it_was(block, mode):
    model = apply_ac(build(block), mode, units=UNITS)
    assert_equal(train(model), train(build(block)))
    if block is Counts:
        assert model.layers[0].calls == 2
    if block is BatchNorm:
        assert model.layers[0].norm.num_batches_tracked == 2


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("block", [BatchNorm, Routed, Counts])
def test_so_it_is_when_other_forwards_come_before_the_backward(block, mode):
    model = apply_ac(build(block), mode, units=UNITS)
    assert_equal(train(model, micro_batches=3), train(build(block), micro_batches=3))


@pytest.mark.parametrize("block", [BatchNorm, Average, Rebound, SpectralNorm])
def test_so_it_is_around_compiled_code(block):
    torch._dynamo.reset()
    model = apply_compile(build(block), units=UNITS, backend="aot_eager")
    apply_ac(model, "full", units=UNITS)
    assert_equal(train(model), train(build(block)), exactly=False)


def test_a_second_backward_recomputes_from_the_same_state():
    results = []
    for model in (build(Average), apply_ac(build(Average), "full", units=UNITS)):
        torch.manual_seed(0)
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*results)


class Switch(Block):
    def forward(self, x):
        return self.outer(F.dropout(self.inner(x), 0.5, self.training).tanh())


def test_the_mode_of_the_forward_is_that_of_the_recomputation():
    results = []
    for model in (build(Switch), apply_ac(build(Switch), "full", units=UNITS)):
        torch.manual_seed(0)
        loss = model(torch.randn(6, 8)).square().mean()
        model.eval()
        loss.backward()
        assert not model.layers[0].training
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*results)


class Large(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.ones(2**15, 8))
        self.register_buffer("mask", torch.ones(4, 4)[1:])

    def forward(self, x):
        with torch.no_grad():
            self.codebook[0] += x[0]
        return self.inner(x)


class Masked(Large):
    def forward(self, x):
        self.mask.mul_(2)
        return self.inner(x)


class Renormed(Block):
    def forward(self, x):
        with torch.no_grad():
            self.outer.weight.mul_(0.5)
        return self.outer(x)


def test_state_that_would_cost_memory_or_part_from_what_it_shares_is_refused():
    x = torch.randn(6, 8)
    for block, name in (
        (Large, r"buffer 'codebook' \(1048576 bytes\)"),
        (Masked, r"buffer 'mask' \(a view\)"),
        (Renormed, "parameter 'outer.weight'"),
    ):
        model = apply_ac(build(block), "full", units=UNITS)
        with pytest.raises(
            ValueError, match=f"a {block.__name__} can't .* changed {name} in place"
        ):
            model(x)
        with torch.no_grad():
            model(x)


def test_a_step_between_forward_and_backward_is_refused():
    model = apply_ac(build(Switch), "full", units=UNITS)
    loss = model(torch.randn(6, 8)).sum()
    with torch.no_grad():
        model.layers[0].inner.bias.add_(1)  # which plain torch wouldn't notice: nothing needs it
    with pytest.raises(ValueError, match=r"'inner.bias' changed in place between its forward and"):
        loss.backward()


class Remembers(Block):
    def forward(self, x):
        self.output = self.outer(self.inner(x))
        return self.output


def test_outputs_kept_as_attributes_are_not_kept_for_longer():
    model, seen = apply_ac(build(Remembers), "full", units=UNITS), []
    for _ in range(4):
        seen.append(weakref.ref(model(torch.randn(6, 8))))
    assert [ref() is None for ref in seen] == [True, True, True, False]


class Silu(Block):
    def forward(self, x=None, pair=None, state=None):
        x = x if pair is None else pair[1]
        return self.inner(F.silu(x, inplace=True))


class FillsDict(Block):
    """Changes a dict of its caller, which sees it."""

    def forward(self, x, state):
        state["h"] = state["h"] + self.inner(state["h"]).tanh()
        state["log"].append(len(state["log"]))
        return x + self.outer(state["h"]) * state["log"][-1]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_arguments_changed_in_place_are_refused_by_name(mode):
    unit = apply_ac(build(Silu), mode, units=UNITS).layers[0]
    x = torch.randn(6, 8, requires_grad=True) * 2
    for call, name in (
        (lambda: unit(x), r"args\[0\]"),
        (lambda: unit(x=x), r"kwargs\['x'\]"),
        (lambda: unit(pair=(None, x)), r"kwargs\['pair'\]\[1\]"),
    ):
        with pytest.raises(
            ValueError, match=f"a Silu can't .* changed its argument {name} in place"
        ):
            call()
    with torch.no_grad():
        unit(x.clone())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_containers_that_a_forward_changes_are_recomputed_from_what_they_were(mode):
    results = []
    for model in (build(FillsDict), apply_ac(build(FillsDict), mode, units=UNITS)):
        torch.manual_seed(0)
        state = {"h": torch.randn(6, 8), "log": []}
        model(torch.randn(6, 8), state).square().sum().backward()
        assert state["log"] == [0, 1]
        results.append({"h": state["h"], **{n: p.grad for n, p in model.named_parameters()}})
    assert_equal(*results)


class State:
    def __init__(self, h):
        self.h = h


class FillsObject(Block):
    def forward(self, state):
        state["h"] = self.inner(state["h"])
        return state["h"]


class SetsAttribute(Block):
    def forward(self, state):
        state.h = self.inner(state.h)
        return state.h


def test_objects_that_a_forward_changes_are_refused():
    x = torch.randn(6, 8)
    for block, state in ((SetsAttribute, State(x)), (FillsObject, collections.UserDict(h=x))):
        unit = apply_ac(build(block), "full", units=UNITS).layers[0]
        with pytest.raises(ValueError, match=r"changed its argument args\[0\] in place"):
            unit(state)


@dataclasses.dataclass
class Context:
    size: int = 0


class Sized(Block):
    def forward(self, x, context):
        size = context.size if isinstance(context, Context) else context["size"]
        return x + self.outer(torch.tanh(self.inner(x) * size))


class Numbered(Stack):
    """Gives all blocks one object, and changes what it holds between them."""

    def __init__(self, kind):
        super().__init__(Sized, n=3)
        self.kind = kind

    def forward(self, x):
        x, context = self.first(x), self.kind()
        for size, layer in enumerate(self.layers, 1):
            if isinstance(context, Context):
                context.size = size
            else:
                context["size"] = size
            x = layer(x, context)
        return x


@pytest.mark.parametrize("kind", [Context, dict, collections.UserDict, collections.Counter])
@pytest.mark.parametrize("mode", ["full", "selective", "full, compiled"])
def test_objects_that_others_change_later_are_recomputed_from_what_they_were(kind, mode):
    torch.manual_seed(0)
    reference = Numbered(kind)
    model = copy.deepcopy(reference)
    if "compiled" in mode:
        apply_compile(model, backend="eager", units=UNITS)
    apply_ac(model, mode.partition(",")[0], units=UNITS)
    x = torch.randn(6, 8)
    assert_equal(gradients(model, x), gradients(reference, x))


def test_iterators_are_refused():
    unit = apply_ac(build(Sized), "full", units=UNITS).layers[0]
    for given in (iter([1]), {"size": iter([1])}):
        with pytest.raises(ValueError, match="called with an iterator"):
            unit(torch.randn(6, 8), given)


class Tallies(Block):
    """In a tensor that is no buffer."""

    def __init__(self, size=1):
        super().__init__()
        self.calls = torch.zeros(size)

    def forward(self, x):
        self.calls += 1
        return x + self.outer(torch.tanh(self.inner(x) / self.calls[0]))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_tensors_that_are_attributes_are_treated_like_buffers(mode):
    reference, model = build(Tallies), apply_ac(build(Tallies), mode, units=UNITS)
    x = torch.randn(6, 8)
    for _ in range(2):
        assert_equal(gradients(model, x), gradients(reference, x))
    assert model.layers[0].calls == 2
    unit = apply_ac(Stack(lambda: Tallies(2**15)), mode, units=UNITS).layers[0]
    with pytest.raises(ValueError, match=r"changed attribute 'calls' in place"):
        unit(x)


class Scaled(Block):
    def forward(self, x, scale):
        return x + self.outer(torch.tanh(self.inner(x) * scale))


@pytest.mark.parametrize("scales", [(3, 4, 5), (0.5, 0.25, 0.125)])
def test_numbers_that_change_between_calls_of_compiled_units(scales):
    torch._dynamo.reset()
    reference, model = build(Scaled), build(Scaled)
    apply_ac(apply_compile(model, backend="aot_eager", units=UNITS), "selective", units=UNITS)
    x = torch.linspace(-1, 1, 48).view(6, 8)
    for scale in scales:
        results = []
        for each in (model, reference):
            each.zero_grad()
            each(x, scale).square().sum().backward()
            results.append({name: p.grad for name, p in each.named_parameters()})
        assert_equal(*results, exactly=False)


class Graph(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(6).roll(1, 0).to_sparse())

    def forward(self, x):
        return x + self.outer(torch.sparse.mm(self.edges, self.inner(x)).tanh())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_sparse_buffers_are_left_alone(mode):
    x = torch.linspace(-1, 1, 48).view(6, 8)
    model = apply_ac(build(Graph), mode, units=UNITS)
    assert_equal(gradients(model, x), gradients(build(Graph), x))


def test_autocast_casts_weights_anew_in_each_call_of_a_unit():
    results = []
    for model in (build(BatchNorm), apply_ac(build(BatchNorm), "selective", units=UNITS)):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=len(results) == 1):
            loss = sum(model(x).square().mean() for x in torch.linspace(-1, 2, 96).view(2, 6, 8))
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*results)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_values_of_functional_call_are_those_of_the_recomputation(mode):
    args = ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=11, multiple_of=8)
    torch.manual_seed(0)
    reference = Transformer(args)
    model = apply_ac(copy.deepcopy(reference), mode)
    other = {n: (p.detach() * 1.3).requires_grad_() for n, p in reference.named_parameters()}
    tokens, results = torch.randint(11, (2, 6)), []
    for each in (model, reference):
        loss = torch.func.functional_call(each, other, (tokens,)).square().mean()
        gradients = torch.autograd.grad(loss, [*other.values()])
        results.append(dict(zip(other, gradients)))
        assert all(p is not other[name] for name, p in each.named_parameters())
    assert_equal(*results)


class Draws(Block):
    """Of the generators that torch's checkpoint doesn't know."""

    def __init__(self):
        super().__init__()
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.numpy = np.random.default_rng(3)

    def forward(self, x, generator=None):
        x = self.inner(x).tanh() * random.random() * self.python.random()
        x = self.outer(x).tanh() * float(np.random.rand()) * float(self.numpy.random())
        x = x * torch.rand(x.shape, generator=self.torch)
        return self.inner(x).tanh() * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_A02_every_generator_draws_the_same_again_and_goes_on_as_without(mode):
    results = []
    for model in (build(Draws), apply_ac(build(Draws), mode, units=UNITS)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model.zero_grad()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(6, 8), generator=generator).square().sum().backward()
        after = [random.random(), np.random.rand(), torch.rand(1, generator=generator).item()]
        after += [torch.rand(1, generator=layer.torch).item() for layer in model.layers]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append({"after": torch.tensor(after), **gradients})
    assert_equal(*results)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_A02_generators_of_a_copy_and_those_that_come_later(mode):
    results = []
    for model in (build(Draws), apply_ac(build(Draws), mode, units=UNITS)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        x = torch.randn(6, 8)
        gradients(model, x)
        copied = copy.deepcopy(model)
        results.append([gradients(copied, x)])
        for layer in copied.layers:
            layer.python = random.Random(5)
        results[-1].append(gradients(copied, x))
    for got, want in zip(*results):
        assert_equal(got, want)


class DrawsLater(Block):
    rate = 0.0

    def forward(self, x):
        keep = random.random() if self.rate else 1.0
        return x + self.outer(torch.tanh(self.inner(x) * keep))


def test_A02_a_generator_that_the_first_call_leaves_alone():
    results = []
    for model in (build(DrawsLater), apply_ac(build(DrawsLater), "full", units=UNITS)):
        x = torch.linspace(-1, 1, 48).view(6, 8)
        gradients(model, x)
        for layer in model.layers:
            layer.rate = 0.5
        random.seed(0)
        results.append(gradients(model, x))
    assert_equal(*results)
