import dataclasses
import warnings
from collections import Counter

import pytest
import torch
import torch._dynamo
import torch._inductor.debug  # first use of a backend imports these: better before ranks are forked
import torch._inductor.decomposition
import torch._inductor.pattern_matcher
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

import harness
from harness import distributed
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import SelectivePolicy, apply_ac
from ptx.parallel._compile import apply_compile
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._tp import apply_tp

# Dynamo looks at `.grad` of a block's input (torch 2.13), and only shows it where warnings are errors.
GRAD_WARNING = "The .grad attribute of a Tensor that is not a leaf"
pytestmark = pytest.mark.filterwarnings(f"ignore:{GRAD_WARNING}")

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=13)
MODES = (None, "full", "selective")
MESHES = {"tp 2": {"tp": 2}, "dp 2": {"dp_shard": 2}, "dp 2 x tp 2": {"dp_shard": 2, "tp": 2}}


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests():
    torch._dynamo.reset()


def build(**changes):
    torch.manual_seed(0)
    return Transformer(dataclasses.replace(ARGS, **changes))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(13, (2, 4, 8), generator=generator)


def wrap(model, mode, *, compile_first, **options):
    if compile_first:
        apply_compile(model, **options)
    if mode is not None:
        apply_ac(model, mode)
    if not compile_first:
        apply_compile(model, **options)
    return model


def backward(model, tokens, labels):
    loss = F.cross_entropy(full(model(tokens)).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model, reference):
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (full(got.grad) - want.grad).abs().max() / want.grad.abs().max()
        assert difference <= 1e-5, (name, difference)


def count_matmuls(call):
    """Products that ``call`` computes; kernels of inductor call the same one."""
    with torch.autograd.profiler.profile() as profile:
        call()
    calls = Counter(event.name for event in profile.function_events)
    return calls["aten::mm"] + calls["aten::addmm"]


# What is recomputed of the 7 products of a block. Code that is compiled with the recomputation drops
# w2, whose output nothing needs; what is compiled by itself runs as a whole.
RECOMPUTED = {
    "none": (None, 0),
    "full": ("full", 7),
    "selective": ("selective", 3),
    "every matmul": (SelectivePolicy(every=1), 0),
}


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("case", RECOMPUTED)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_either_order_recomputes_what_the_mode_says(backend, case, compile_first):
    mode, recomputed = RECOMPUTED[case]
    reference, model = build(), wrap(build(), mode, compile_first=compile_first, backend=backend)
    torch.testing.assert_close(backward(model, *batch()), backward(reference, *batch()))
    assert_same_gradients(model, reference)
    loss = model(batch()[0]).square().mean()
    assert count_matmuls(loss.backward) == (14 + recomputed) * ARGS.n_layers + 2


@pytest.mark.parametrize("mode", MODES)
def test_A05_equal_blocks_compile_to_one_graph(mode):
    graphs = []
    for n_layers in (12, 24):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = build(n_layers=n_layers)
        model.tok_embeddings.weight.requires_grad_(False)  # the first input is without gradient
        wrap(model, mode, compile_first=False, backend=counter)
        model(batch()[0]).square().mean().backward()
        graphs.append(counter.frame_count)
    assert graphs == [2, 2]


def test_parts_of_a_block_share_graphs_too():
    counter = CompileCounterWithBackend("eager")
    model = apply_compile(build(n_layers=12), backend=counter)
    apply_ac(model, "selective", units=["layers.*.attention"])
    model(batch()[0]).square().mean().backward()
    assert counter.frame_count == 1


def save_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def test_units_with_different_policies_are_kept_apart():
    model = build(n_layers=3)
    apply_ac(model, save_nothing, units=["layers.0"])
    apply_ac(model, SelectivePolicy(every=1), units=["layers.1"])
    apply_compile(model, backend="aot_eager")
    for _ in range(2):
        loss = model(batch()[0]).square().mean()
        assert count_matmuls(loss.backward) == 14 * 3 + 2 + 6


@pytest.mark.parametrize(
    ("compiled", "recomputed", "mode"),
    [
        ("layers.*", "layers.*.feed_forward", "full"),
        ("layers.*", "layers.*.attention", "selective"),
        ("layers.*.attention", "layers.*", "full"),
        ("layers.*.attention", "layers.*.feed_forward", "selective"),
    ],
)
def test_units_of_the_two_may_differ(compiled, recomputed, mode):
    reference, model = build(), build()
    apply_ac(model, mode, units=[recomputed])
    apply_compile(model, units=[compiled], backend="aot_eager")
    backward(model, *batch())
    backward(reference, *batch())
    assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("mesh", "compile_first"),
    [
        ("tp 2", False),
        ("dp 2", True),
        ("dp 2 x tp 2", False),
        pytest.param("tp 2", True, marks=pytest.mark.slow),
        pytest.param("dp 2", False, marks=pytest.mark.slow),
        pytest.param("dp 2 x tp 2", True, marks=pytest.mark.slow),
    ],
)
def test_meshes_give_the_gradients_of_one_process(mesh, compile_first):
    ranks = torch.Size(MESHES[mesh].values()).numel()
    harness.run(check_mesh, ranks, mesh, compile_first, "aot_eager", timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_give_the_gradients_of_one_process_with_inductor(mesh):
    ranks = torch.Size(MESHES[mesh].values()).numel()
    harness.run(check_mesh, ranks, mesh, True, "inductor", timeout=600)


def check_mesh(name, compile_first, backend):
    warnings.filterwarnings("ignore", message=GRAD_WARNING)
    mesh = build_mesh(**MESHES[name], device_type="cpu")
    reference, (tokens, labels) = build(), batch()
    want = backward(reference, tokens, labels)
    data = data_mesh(mesh)
    mine = torch.arange(4).chunk(data.size())[data.get_local_rank()]
    for mode in MODES:
        torch._dynamo.reset()
        model = apply_tp(build(), mesh["tp"])
        wrap(model, mode, compile_first=compile_first, backend=backend)
        if data.size() > 1:
            apply_fsdp2(model, fsdp_mesh(mesh))
        for _ in range(2):
            model.zero_grad()
            loss = backward(model, tokens[mine], labels[mine])
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            torch.testing.assert_close(loss, want)
            assert_same_gradients(model, reference)


@distributed(world_size=2)
def test_compiled_blocks_leave_the_tp_embedding_its_gradient():
    # Its output is on its way to the first block: without a boundary the gradient is lost, or the
    # backward fails.
    warnings.filterwarnings("ignore", message=GRAD_WARNING)
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference, model = build(n_layers=1), apply_tp(build(n_layers=1), mesh)
    apply_compile(model, backend="aot_eager")
    backward(reference, *batch())
    backward(model, *batch())
    want, got = reference.tok_embeddings.weight.grad, full(model.tok_embeddings.weight.grad)
    assert want.norm() > 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@distributed(world_size=2)
def test_random_ops_under_tp_compile_with_any_policy():
    warnings.filterwarnings("ignore", message=GRAD_WARNING)
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    for mode in ("selective", save_nothing):
        models = [apply_ac(apply_tp(build(n_layers=1), mesh), mode) for _ in range(2)]
        torch._dynamo.reset()
        apply_compile(models[0], backend="aot_eager")
        for model in models:
            block = model.layers["0"]
            block.feed_forward.w2.register_forward_pre_hook(drop, prepend=True)
            torch.manual_seed(0)
            backward(model, *batch())
        for got, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(full(got.grad), full(want.grad), rtol=1e-4, atol=1e-6)


def drop(module, inputs):
    return (F.dropout(inputs[0], 0.5),)


@distributed(world_size=2)
def test_tp_blocks_compiled_as_a_whole_refuse_to_recompute_a_part():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    model = apply_compile(apply_tp(build(), mesh))
    with pytest.raises(ValueError, match="compiled code can't recompute a part of itself"):
        apply_ac(model, "full", units=["layers.*.attention"])
    model = apply_ac(apply_tp(build(), mesh), "full", units=["layers.*.attention"])
    with pytest.raises(ValueError, match="compiled code can't recompute a part of itself"):
        apply_compile(model)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def times(factor):
    return lambda module, inputs, output: output * factor


@pytest.mark.parametrize("when", ["before", "between", "after a step", "removed", "replaced"])
@pytest.mark.parametrize("number", [0, 2])
def test_hooks_of_submodules_are_compiled_as_they_are_at_each_call(when, number):
    counter = CompileCounterWithBackend("eager")
    model, reference, x = Hooked(), Hooked(), torch.randn(2, 4)
    reference.load_state_dict(model.state_dict())
    linear = model.layers[number][0]
    if when in ("before", "removed", "replaced"):
        handle = linear.register_forward_hook(times(2))
    apply_compile(model, units=["layers.*"], backend=counter)
    if when == "between":
        linear.register_forward_hook(times(3))
    else:
        model(x)
    if when in ("removed", "replaced"):
        handle.remove()
    if when in ("after a step", "replaced"):
        linear.register_forward_hook(times(3))
    factor = {"before": 2, "removed": None}.get(when, 3)
    if factor is not None:
        reference.layers[number][0].register_forward_hook(times(factor))
    torch.testing.assert_close(model(x), reference(x))
    assert counter.frame_count <= 4
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_backward_hooks_of_submodules_are_refused():
    model, x = Hooked(), torch.randn(2, 4)
    apply_compile(model, units=["layers.*"], backend="eager")
    model(x).sum().backward()
    model.layers[1][0].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    with pytest.raises(ValueError, match="a submodule of a unit has a backward hook"):
        model(x)


@pytest.mark.parametrize("mode", MODES)
def test_models_of_one_process_share_graphs(mode):
    counter = CompileCounterWithBackend("eager")
    for _ in range(9):  # torch raises at the 9th graph of a forward
        model = build(n_layers=1)
        wrap(model, mode, compile_first=False, backend=counter)
        model(batch()[0]).square().mean().backward()
    assert counter.frame_count == 1


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)


def test_options_are_those_of_torch_compile():
    model = nn.Module()
    model.layers = nn.ModuleList(Branching() for _ in range(2))
    apply_compile(model, units=["layers.0"], backend="eager")
    apply_compile(model, units=["layers.1"], backend=aot_eager, fullgraph=False, dynamic=True)
    x = torch.randn(2, 3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model.layers[0](x)
    torch.testing.assert_close(model.layers[1](x), model.layers[1].inner(x))


def test_wrong_calls_are_refused_with_all_their_reasons():
    model = apply_compile(build(), units=["layers.0", "layers.1.attention"])
    with pytest.raises(ValueError, match="apply_compile: ") as error:
        apply_compile(model)
    assert str(error.value) == (
        "apply_compile: 'layers.0' is compiled already; 'layers.1.attention' is inside 'layers.1': it"
        " would be compiled with it, its own options lost; compile one of them"
    )
    with pytest.raises(ValueError, match="a policy doesn't see the ops of compiled code"):
        apply_compile(apply_ac(build(), "selective"), units=["layers.*.attention"])
    with pytest.raises(ValueError, match=r"'layer.\*' matches nothing"):
        apply_compile(build(), units=["layer.*"])


@distributed(world_size=2)
def test_come_after_tp_and_before_fsdp():
    mesh = build_mesh(dp_shard=2, device_type="cpu")
    model = apply_fsdp2(build(), fsdp_mesh(mesh))
    for late in (lambda: apply_compile(model), lambda: apply_ac(model, "full")):
        with pytest.raises(ValueError, match=r"went through apply_fsdp2; call apply_\w+ before"):
            late()
