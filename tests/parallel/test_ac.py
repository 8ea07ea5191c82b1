import copy
import dataclasses
import itertools

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from collectives import CollectiveLog
from harness import distributed
from ops import OpLog
from ptx.mesh import build_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import SelectivePolicy, apply_ac
from ptx.parallel._compile import apply_compile
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan

# Dynamo looks at `.grad` of a block's input (torch 2.13), and only shows it where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ARGS = ModelArgs(dim=16, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=13)
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def save_attention(ctx, op, *args, **kwargs):
    return SAVE if "attention" in op.name() else RECOMPUTE


def save_nothing(ctx, op, *args, **kwargs):
    return RECOMPUTE


MODES = {
    "full": "full",
    "selective": "selective",
    "every matmul": SelectivePolicy(every=1),
    "own policy": save_attention,
}


def build(**changes):
    torch.manual_seed(0)
    return Transformer(dataclasses.replace(ARGS, **changes))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(13, (2, 2, 8), generator=generator)


def backward(model, tokens, labels):
    logits = model(tokens)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: full(p.grad) for name, p in model.named_parameters()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("mode", MODES)
def test_changes_neither_loss_nor_gradients_nor_the_model_as_seen(mode):
    reference, model = build(), build()
    assert apply_ac(model, MODES[mode]) is model
    assert [(n, type(m)) for n, m in model.named_modules()] == [
        (n, type(m)) for n, m in reference.named_modules()
    ]
    for _ in range(2):
        assert torch.equal(backward(model, *batch()), backward(reference, *batch()))
        assert_equal(gradients(model), gradients(reference))
    with torch.no_grad(), OpLog() as log:
        assert torch.equal(model(batch()[0]), reference(batch()[0]))
    assert log.calls["mm"] == 2 * (7 * 3 + 1)


# A block has 7 products: wq wk wv wo w1 w3 w2. The backward of each is 2 more; the head adds 1 + 2.
# Nothing needs the output of w2.
@pytest.mark.parametrize(
    ("mode", "products", "attention"),
    [
        (None, 0, 0),
        ("full", 6, 1),
        ("selective", 3, 0),
        (SelectivePolicy(every=1), 0, 0),
        (SelectivePolicy(every=3), 4, 0),
        (save_attention, 6, 0),
        (save_nothing, 6, 1),
    ],
)
def test_recomputes_what_the_rule_says_and_no_more(mode, products, attention):
    model = build()
    if mode is not None:
        apply_ac(model, mode)
    with OpLog() as forward:
        loss = model(batch()[0]).square().mean()
    with OpLog() as back:
        loss.backward()
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward.calls["mm"] == 7 * 3 + 1
    assert forward.calls[flash] == 3
    assert back.calls["mm"] == (14 + products) * 3 + 2
    assert back.calls[flash] == attention * 3


def test_only_the_units_named_are_checkpointed():
    model = build()
    apply_ac(model, "full", units=["layers.0", ["layers.1.attention", "layers.1.feed_forward"]])
    loss = model(batch()[0]).square().mean()
    with OpLog() as log:
        loss.backward()
    assert log.calls["mm"] == 14 * 3 + 2 + 6 + 3 + 2
    assert apply_ac(build(), "full", units=[]) is not None


def test_selective_knows_every_attention_kernel_and_no_batched_product():
    def saved(op):
        return SelectivePolicy(every=1)(None, op) is SAVE

    kernels = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("aten::_scaled_dot_product", "aten::_flash_attention"))
        and "backward" not in schema.name
    }
    assert {"_scaled_dot_product_cudnn_attention", "_flash_attention_forward"} <= kernels
    for name in kernels:
        packet = getattr(torch.ops.aten, name)
        assert saved(getattr(packet, packet.overloads()[0])), name
    assert saved(torch.ops.higher_order.flex_attention)
    assert saved(torch.ops.aten.addmm.default)
    assert saved(torch.ops.aten._scaled_mm.default)
    assert saved(torch.ops.aten.mm.dtype)  # an overload counts like its op
    for op in (
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.add.Tensor,
    ):
        assert not saved(op), op


class CountingPolicy:
    """Saves the first product of a region; tells what it saw through a list that copies share."""

    def __init__(self):
        self.seen = 0
        self.log = []

    def __call__(self, ctx, op, *args, **kwargs):
        if op is not torch.ops.aten.mm.default:
            return RECOMPUTE
        self.seen += 1
        self.log.append(self.seen)
        return SAVE if self.seen == 1 else RECOMPUTE


def test_a_counting_policy_starts_anew_in_each_call_of_a_unit():
    model, policy = build(), CountingPolicy()
    apply_ac(model, policy)
    for _ in range(2):
        model(batch()[0]).square().mean().backward()
    assert policy.log == [*range(1, 8)] * 3 * 2
    assert policy.seen == 0


class Stack(nn.Module):
    def __init__(self, block, n=2):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(n))

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


class Dropped(nn.Module):
    """Where the mask is 0, so is the output, and so must be the gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return torch.sin(F.dropout(x * x * self.scale.weight.abs().view(()) + x, 0.5))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("mode", ["full", "selective", "own policy"])
def test_A02_recomputation_draws_the_same_dropout_masks(mode, backend):
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, reference = Stack(Dropped, 1), Stack(Dropped, 1)
    reference.load_state_dict(model.state_dict())
    apply_ac(model, MODES[mode])
    if backend:
        apply_compile(model, backend=backend)
    results = []
    for each in (model, reference):
        torch.manual_seed(4)
        x = torch.ones(1000, requires_grad=True)
        out = each(x)
        torch.rand(10)  # whatever comes between forward and backward
        out.sum().backward()
        assert int(((out != 0) != (x.grad != 0)).sum()) == 0
        results.append((out.detach(), x.grad, each.layers[0].scale.weight.grad))
    assert 400 < int((results[0][0] != 0).sum()) < 600
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)

    def forward(self, x, *, debug, context_fn=None):
        return self.outer(torch.tanh(self.inner(x)) * debug)


def test_keywords_of_a_forward_are_its_own_even_those_that_checkpoint_has():
    torch.manual_seed(0)
    model = Stack(Keywords)
    reference = copy.deepcopy(model)
    apply_ac(model, "selective")
    results = []
    for each in (model, reference):
        x, debug = torch.ones(2, 3, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
        each(x, debug=debug, context_fn="mine").square().sum().backward()
        results.append({"x": x.grad, "debug": debug.grad, **gradients(each)})
    assert_equal(*results)


def test_hooks_of_a_unit_run_once_a_step():
    model, calls = build(), []
    apply_ac(model, "full")
    model.layers["0"].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.layers["0"].register_forward_hook(lambda *_: calls.append("after"))
    model.layers["0"].ffn_norm.register_forward_hook(lambda *_: calls.append("inside"))
    backward(model, *batch())
    assert calls == ["before", "inside", "after", "inside"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_copy_computes_with_its_own_weights(mode):
    model = apply_ac(apply_compile(build(), backend="eager"), mode)
    average, reference = copy.deepcopy(model), build()
    for each in (average, reference):
        for parameter in each.parameters():
            parameter.data.mul_(1.5)
    backward(average, *batch())
    backward(reference, *batch())
    assert_equal(gradients(average), gradients(reference))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match=r"'layers.0' is checkpointed already"):
        apply_ac(average, mode)


def test_a_forward_that_someone_replaced_is_kept():
    model = Stack(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 1)
    inner = model.layers[0].forward
    model.layers[0].forward = lambda x: inner(x) + 1
    x = torch.ones(2, 3)
    want = model(x)
    apply_ac(model, "full", units=["layers.0"])
    assert torch.equal(model(x), want)


def test_wrong_calls_are_refused_with_all_their_reasons():
    with pytest.raises(
        ValueError, match=r"mode must be 'full', 'selective' or a policy .* got 'block'"
    ):
        apply_ac(build(), "block")
    with pytest.raises(ValueError, match="mode must be"):
        apply_ac(build(), [torch.ops.aten.mm.default])
    with pytest.raises(ValueError, match=r"'layer.0' matches nothing; closest: 'layers"):
        apply_ac(build(), "full", units=["layer.0"])
    model = apply_ac(build(), "full", units=["layers.0", "layers.1.attention"])
    with pytest.raises(ValueError) as error:
        apply_ac(model, "full")
    assert str(error.value) == (
        "apply_ac: 'layers.0' is checkpointed already; 'layers.1.attention' is inside 'layers.1': it"
        " would be recomputed twice; checkpoint one of them"
    )
    with pytest.raises(ValueError, match=r"'layers.0.attention' is inside 'layers.0': .* twice"):
        apply_ac(build(), "full", units=["layers.*", "layers.0.attention"])
    compiled = apply_compile(build(), units=["layers.0.feed_forward"])
    with pytest.raises(ValueError, match="a policy doesn't see the ops of compiled code"):
        apply_ac(compiled, "selective")
    apply_ac(compiled, "full")  # nothing was changed before, and this is fine


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(intermediate_size=24, **sizes, **ids, **changes))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_transformers_blocks_are_exact_and_their_cache_is_refused(mode):
    reference, model = llama(use_cache=False), apply_ac(llama(use_cache=False), mode)
    tokens = batch()[0]
    for each in (reference, model):
        each(tokens).logits.square().mean().backward()
    assert_equal(gradients(model), gradients(reference))
    with pytest.raises(ValueError, match="LlamaDecoderLayer was called with a key/value cache"):
        model(tokens, use_cache=True)
    with torch.no_grad():
        model(tokens, use_cache=True)  # nothing is recomputed


WRAPPINGS = {
    "plain": lambda model: model,
    "full": lambda model: apply_ac(model, "full"),
    "selective": lambda model: apply_ac(model, "selective"),
    "compile": lambda model: apply_compile(model, backend="eager"),
    "AC, compile": lambda model: apply_compile(apply_ac(model, "selective"), backend="eager"),
    "compile, AC": lambda model: apply_ac(apply_compile(model, backend="eager"), "full"),
}


@distributed(world_size=2)
def test_A01_names_are_those_of_the_plain_model_and_states_load_into_each_other():
    tp, dp = build_mesh(tp=2, device_type="cpu"), build_mesh(dp_shard=2, device_type="cpu")
    whole = StateDictOptions(full_state_dict=True)
    reference = build(n_layers=1)
    want = {name: p.detach().clone() for name, p in reference.named_parameters()}
    for kind in ("one process", "tp", "fsdp"):
        models, states = [], []
        for number, wrap in enumerate(WRAPPINGS.values()):
            model = build(n_layers=1)
            if kind == "tp":
                apply_tp(model, tp["tp"])
            wrap(model)
            if kind == "fsdp":
                apply_fsdp2(model, fsdp_mesh(dp))
            names = names_of(model)
            assert names == names_of(reference), (kind, wrap)
            assert isinstance(model.layers["0"], type(reference.layers["0"]))
            scaled = {name: value * number for name, value in want.items()}
            set_model_state_dict(model, dict(scaled), options=whole)
            models.append(model)
            assert_equal(get_model_state_dict(model, options=whole), scaled)
            states.append({n: v.clone() for n, v in model.state_dict().items()})
        for state, model in itertools.product(states, models):
            model.load_state_dict(state)
            assert_equal(locally(model.state_dict()), locally(state))


def locally(state):
    return {n: v.to_local() if isinstance(v, DTensor) else v for n, v in state.items()}


def names_of(model):
    return (
        list(model.state_dict()),
        list(get_model_state_dict(model)),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_modules()],
    )


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mlp(nn.Module):
    """4 -> 4 -> 4. The output of the first layer is saved, in the dtype of the computation."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


@distributed(world_size=2)
def test_A04_recomputation_has_the_dtypes_of_the_forward():
    mesh = build_mesh(dp_shard=2, device_type="cpu")
    torch.manual_seed(0)
    start, x = Stack(Mlp), torch.randn(2, 3, 4)[dist.get_rank()]

    def run(wrap):
        model = copy.deepcopy(start)
        model = wrap(model) or model
        given = x.clone().requires_grad_()
        model(given).float().square().mean().backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        return {"x": given.grad, **gradients(model)}

    def by_torch(model):  # each block casts its own input
        for layer in model.layers:
            fully_shard(layer, mesh=fsdp_mesh(mesh), mp_policy=BF16)
        fully_shard(model, mesh=fsdp_mesh(mesh), mp_policy=BF16)

    def by_ptx(model, units=None):
        apply_fsdp2(model, fsdp_mesh(mesh), units=units, mp_policy=BF16)

    plain = run(lambda model: None)
    for shard in (by_torch, by_ptx):
        want = run(shard)
        assert not torch.allclose(want["x"], plain["x"], rtol=1e-5)  # bfloat16 shows
        for mode in MODES.values():
            assert_equal(run(lambda m: shard(apply_ac(m, mode))), want)  # noqa: B023
    # The other nesting: sharded inside of what is recomputed.
    inner = ["layers.*.inner", "layers.*.outer"]
    want = run(lambda m: by_ptx(m, inner))
    for mode in MODES.values():
        assert_equal(run(lambda m: by_ptx(apply_ac(m, mode), inner)), want)  # noqa: B023


@distributed(world_size=2)
def test_selective_repeats_no_sum_over_ranks():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference = build()
    loss = backward(reference, *batch())
    for sequence_parallel, sums in ((True, "reduce_scatter"), (False, "all_reduce")):
        calls = {}
        for mode in (None, "selective", "full"):
            model = build()
            apply_tp(model, mesh, tp_plan(model, sequence_parallel=sequence_parallel))
            if mode is not None:
                apply_ac(model, mode)
            logits = model(batch()[0]).full_tensor()
            got = F.cross_entropy(logits.flatten(0, 1), batch()[1].flatten())
            with CollectiveLog() as log:
                got.backward()
            calls[mode] = log
            torch.testing.assert_close(got, loss)
            torch.testing.assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)
        assert calls["selective"].count(sums) == calls[None].count(sums)
        assert calls["full"].count(sums) == calls[None].count(sums) + 3  # of wo; w2 comes last


@distributed(world_size=1)
def test_apply_tp_after_it_is_refused():
    mesh = build_mesh(device_type="cpu")
    for step in (lambda m: apply_ac(m, "full"), lambda m: apply_compile(m, backend="eager")):
        model = step(Transformer(ModelArgs(dim=8, n_layers=2, n_heads=2, vocab_size=7)))
        with pytest.raises(ValueError, match="apply_ac / apply_compile; call apply_tp before it"):
            apply_tp(model, mesh["tp"])
