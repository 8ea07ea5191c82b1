import copy
import logging

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from ops import OpLog
from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import SelectivePolicy, apply_ac
from ptx.parallel._compile import apply_compile
from ptx.parallel._saved_ops import UNSAFE_VIEWS

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
UNITS = ["layers.*"]


def save_all(ctx, op, *args, **kwargs):
    return SAVE


def save(*names):
    return lambda ctx, op, *args, **kwargs: (
        SAVE if op.name().partition(".")[0].removeprefix("aten::") in names else RECOMPUTE
    )


class Stack(nn.Module):
    """Blocks of one class, with 8 features."""

    def __init__(self, block):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Block(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=bias)
        self.outer = nn.Linear(8, 8, bias=bias)


class InPlace(Block):
    """The products of [B, S, 8] without bias are passed on through an unsafe view."""

    def forward(self, x):
        y = self.inner(x)
        y.relu_()
        z = self.outer(y)
        z[..., 0].mul_(0.5)
        z.add_(y).tanh_()
        return self.inner(z)


class Cell(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell(8, 8)

    def forward(self, x):
        h = c = torch.zeros(len(x), 8)
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
        return x + h[:, None]


class Random(Block):
    def forward(self, x):
        x = self.inner(x * torch.rand_like(x)).tanh()
        return self.outer(x * torch.rand_like(x)).tanh()


class Dropped(Random):
    def forward(self, x):
        return self.outer(F.dropout(super().forward(x), 0.5)).tanh()


BLOCKS = {
    "in place": InPlace,
    "random": Random,
    "dropout": Dropped,
    **{f.__name__: lambda f=f: f(8, 8, batch_first=True) for f in (nn.GRU, nn.LSTM, nn.RNN)},
    **{f.__name__: lambda f=f: Cell(f) for f in (nn.GRUCell, nn.LSTMCell, nn.RNNCell)},
}
POLICIES = {
    "selective": "selective",
    "every matmul": SelectivePolicy(every=1),
    "all": save_all,
    "first random op": save("rand_like"),
    "in-place ops": save("relu_", "add_", "tanh_", "bernoulli_"),
}


def backward(model, x):
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(got, want):
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_in_place_ops_and_random_ops_are_exact_under_any_policy(block, policy):
    torch.manual_seed(0)
    reference, x = Stack(BLOCKS[block]), torch.randn(2, 5, 8)
    model = apply_ac(copy.deepcopy(reference), POLICIES[policy], units=UNITS)
    assert_equal(backward(model, x), backward(reference, x))


def test_a_policy_that_saves_everything_recomputes_nothing_of_a_transformer():
    args = ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=11, multiple_of=8)
    torch.manual_seed(0)
    reference, tokens = Transformer(args), torch.randint(11, (2, 6))
    model = apply_ac(copy.deepcopy(reference), save_all)
    assert_equal(backward(model, tokens), backward(reference, tokens))
    loss = model(tokens).square().mean()
    with OpLog() as log:
        loss.backward()
    assert log.calls["mm"] == (7 * 2 + 1) * 2
    assert log.calls["_scaled_dot_product_flash_attention_for_cpu"] == 0


def test_only_what_changes_is_recomputed_although_saved():
    torch.manual_seed(0)
    model = apply_ac(Stack(InPlace), SelectivePolicy(every=1), units=UNITS)
    loss = model(torch.randn(2, 5, 8)).sum()
    with OpLog() as log:
        loss.backward()
    assert log.calls["mm"] == 1 + 2 * (2 * 3 + 2)  # the third product of a block stays


class TwoOutputs(Block):
    def forward(self, x):
        y = self.inner(x)
        return y, self.outer(y.tanh())


@pytest.mark.parametrize("policy", ["every matmul", "all"])
def test_a_saved_output_that_changes_after_the_unit_is_noticed(policy):
    torch.manual_seed(0)
    model = apply_ac(Stack(TwoOutputs), POLICIES[policy], units=UNITS)
    y, z = model.layers[0](torch.randn(2, 5, 8))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"cached during selective .* has been mutated"):
        z.sum().backward()


def test_all_ops_of_torch_with_outputs_that_share_memory_untold_are_known():
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    named = {n for n in names if n.startswith(("aten::unsafe_", "aten::_unsafe_view"))}
    assert named == {op.name().partition(".")[0] for op in UNSAFE_VIEWS} | {"aten::unsafe_chunk"}
    for op in UNSAFE_VIEWS:  # unsafe_chunk is made of unsafe_split
        assert all(result.alias_info is None for result in op._schema.returns)


def test_a_policy_must_answer():
    with pytest.raises(
        ValueError, match=r"policy returned None for aten.*must return a Checkpoint"
    ):
        apply_ac(Stack(InPlace), lambda *_, **__: None, units=UNITS)(torch.randn(2, 5, 8))


class BatchNorm(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.outer(self.norm(self.inner(x)).relu_())


class Average(Block):
    """Changes its buffer, then uses it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        with torch.no_grad():
            self.scale.view(()).lerp_(x.abs().mean(), 0.1)
        return self.outer(self.inner(x / self.scale).tanh())


class UseFirst(Average):
    def forward(self, x):
        x = self.outer(self.inner(x / self.scale.detach().clone()).tanh())
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x


class ChangesInput(Block):
    def forward(self, x):
        return self.inner(F.silu(x, inplace=True))


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.outer(self.inner(x).tanh())


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner()

    def forward(self, x):
        return self.inner(x).tanh()


@pytest.fixture
def _fresh():
    torch._dynamo.reset()
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


@pytest.mark.usefixtures("_fresh")
def test_compiled_batch_norm_is_exact():
    torch.manual_seed(0)
    reference, x = Stack(BatchNorm), torch.randn(6, 8)
    model = apply_ac(copy.deepcopy(reference), "selective", units=UNITS)
    apply_compile(model, units=UNITS, backend="aot_eager")
    for _ in range(2):
        got, want = backward(model, x), backward(reference, x)
    for name, value in (*want.items(), *reference.named_buffers()):
        have = got[name] if name in got else model.get_buffer(name)
        torch.testing.assert_close(have, value, msg=name)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Average, "changes in place what it was given or has as a buffer"),
        (UseFirst, "changes in place what it was given or has as a buffer"),
        (ChangesInput, "changes in place what it was given or has as a buffer"),
        (Counts, "changes an attribute, a buffer or a container"),
    ],
)
def test_changes_that_compiled_code_would_be_recomputed_from_are_refused(block, reason):
    torch.manual_seed(0)
    model = apply_ac(Stack(block), "selective", units=UNITS)
    apply_compile(model, units=UNITS, backend="aot_eager")
    with pytest.raises(ValueError, match=f'{reason}.*whole compiled unit by "full"'):
        model(torch.randn(6, 8))


@pytest.mark.usefixtures("_fresh")
def test_so_they_are_in_a_part_of_compiled_code_in_any_mode():
    model = Stack(lambda: Outer(Average))
    apply_ac(model, "full", units=["layers.*.inner"])
    apply_compile(model, units=UNITS, backend="aot_eager")
    with pytest.raises(ValueError, match="changes in place what it was given or has as a buffer"):
        model(torch.randn(6, 8))
