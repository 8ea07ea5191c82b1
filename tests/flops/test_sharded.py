"""The count is that of the whole model, whatever was made of it on however many ranks."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from harness import distributed
from parallel.strangers import STRANGERS
from ptx.flops import estimate_flops_fake, hfu, mfu, step_tokens, transformer_flops

ARGS = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=53, multiple_of=16)
BATCH, SEQ = 3, 12
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)

VARIANTS = {
    "plain": {},
    "gqa": {"n_kv_heads": 2},
    "one kv head": {"n_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "wide heads": {"head_dim": 16, "n_kv_heads": 2},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "window": {"sliding_window": 5, "window_layers": (True, False)},
}
CASES = [
    (variant, ac, causal)
    for i, variant in enumerate(VARIANTS)
    for j, ac in enumerate(("none", "full", "selective"))
    for causal in [("full", "half")[(i + j) % 2]]
]


def wrapped(args, mesh, ac="none", *, compiled=False, fsdp=True, sequence_parallel=True):
    with torch.device("meta"):
        model = ptx.Transformer(args)
    ptx.apply_tp(model, mesh["tp"], ptx.tp_plan(model, sequence_parallel=sequence_parallel))
    if compiled:
        ptx.apply_compile(model, backend="eager")
    if ac != "none":
        ptx.apply_ac(model, ac)
    if fsdp:
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), mp_policy=BF16)
    return model


def check_everything(sizes, cases=CASES):
    mesh = ptx.build_mesh(**sizes, device_type="cpu")
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    for n, (variant, ac, causal) in enumerate(cases):
        args = dataclasses.replace(ARGS, **VARIANTS[variant])
        model = wrapped(
            args, mesh, ac, compiled=n % 2 == 1, fsdp=n % 3 > 0, sequence_parallel=n % 5 > 0
        )
        count = estimate_flops_fake(model, tokens, causal=causal)
        # Equal in every attribute: by op and by module too.
        assert count == transformer_flops(args, BATCH, SEQ, causal=causal, ac=ac), (variant, ac)


@distributed(world_size=2, timeout=120)
def test_tp_2_equals_the_closed_form():
    check_everything({"tp": 2}, CASES[::2])


@distributed(world_size=2, timeout=120)
def test_dp_shard_2_equals_the_closed_form():
    check_everything({"dp_shard": 2}, CASES[1::2])


@distributed(world_size=4, timeout=120)
def test_dp_shard_2_x_tp_2_equals_the_closed_form():
    check_everything({"dp_shard": 2, "tp": 2}, CASES[::4])


@pytest.mark.slow
@distributed(world_size=4, timeout=300)
def test_more_meshes_equal_the_closed_form():
    check_everything({"tp": 4})


@pytest.mark.slow
@distributed(world_size=4, timeout=300)
def test_hsdp_equals_the_closed_form():
    check_everything({"dp_replicate": 2, "dp_shard": 2})


@distributed(world_size=4)
def test_replicated_kv_heads_count_once():
    mesh = ptx.build_mesh(tp=4, device_type="cpu")
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    for kv in (1, 2):
        args = dataclasses.replace(ARGS, n_kv_heads=kv, qkv_bias=True)
        count = estimate_flops_fake(wrapped(args, mesh, fsdp=False), tokens)
        assert count == transformer_flops(args, BATCH, SEQ)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv,
            vocab_size=52,
        )
        with torch.device("meta"):
            llama = LlamaForCausalLM(config)
        want = estimate_flops_fake(llama, tokens)
        ptx.apply_tp(llama, mesh["tp"])
        assert estimate_flops_fake(llama, tokens) == want


@distributed(world_size=4)
def test_a_model_in_the_middle_of_training():
    mesh = ptx.build_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = wrapped(ARGS, mesh, "full")
    ptx.materialize(model, "cpu", seed=0)
    want = transformer_flops(ARGS, BATCH, SEQ, ac="full")
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    names = {n: (id(p), type(p)) for n, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]

    loss = ptx.cross_entropy(model(tokens), tokens)  # the head is gathered now
    assert estimate_flops_fake(model, tokens) == want
    loss.backward()
    grads = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    assert estimate_flops_fake(model, tokens) == want
    assert {n: (id(p), type(p)) for n, p in model.named_parameters()} == names
    assert [type(m) for m in model.modules()] == classes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.to_local(), grads[name])
    model(tokens).sum().backward()  # still works
    with torch.no_grad():
        assert torch.isfinite(model(tokens).to_local()).all()


@distributed(world_size=2)
def test_fused_losses_on_a_sharded_head():
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    want = transformer_flops(ARGS, BATCH, SEQ)
    for sizes in ({"tp": 2}, {"dp_shard": 2}):
        model = wrapped(ARGS, ptx.build_mesh(**sizes, device_type="cpu"))

        def loss(tokens, labels, model=model):
            hidden = model(tokens, return_hidden=True)
            return ptx.fused_linear_ce(hidden, model.output, labels, reduction="sum")

        count = estimate_flops_fake(loss, tokens, tokens)
        assert (count.forward, count.backward, count.recompute) == (want.forward, want.backward, 0)


@distributed(world_size=2)
def test_models_that_ptx_has_never_seen():
    for name, stranger in STRANGERS.items():
        if name == "gpt":  # its style gives a layer other code, which only knows DTensors
            continue
        for tp in (1, 2) if stranger.plan else (1,):
            mesh = ptx.build_mesh(tp=tp, dp_shard=-1, device_type="cpu")
            model, batch = stranger.model(), stranger.batch(torch.Generator())

            def loss(*batch, model=model, stranger=stranger):
                return stranger.loss(model, *batch)

            want = estimate_flops_fake(loss, *batch)
            if tp > 1:
                ptx.apply_tp(model, mesh["tp"], stranger.plan(model))
            ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), **stranger.fsdp)
            assert estimate_flops_fake(loss, *batch) == want, (name, tp)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()) for _ in range(2)]
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x.mean((2, 3)))}

    def features(self, x):
        return self.stem(x)


@distributed(world_size=2)
def test_torchs_own_wrappers_and_other_models():
    images = torch.randn(2, 3, 16, 16)
    want = estimate_flops_fake(Images(), images)
    assert estimate_flops_fake(DistributedDataParallel(Images()), images) == want

    mesh = dist.init_device_mesh("cpu", (2,))
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = Images()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "features")
        assert estimate_flops_fake(model, images) == want
        if policy.param_dtype is not None:  # prepared for what FSDP would compute in
            assert estimate_flops_fake(model, images.to(policy.param_dtype)) == want
        features = estimate_flops_fake(lambda x, m=model: m.features(x), images)
        assert features.forward == want.by_module["stem"].forward


@distributed(world_size=2)
def test_inputs_that_are_dtensors_are_whole():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    linear = nn.Linear(8, 4)
    x = torch.randn(6, 8)
    part = distribute_tensor(x, mesh, [Shard(0)])
    assert estimate_flops_fake(linear, part) == estimate_flops_fake(linear, x)


def utilisation(sizes, ac):
    """MFU, HFU and tokens of a step that takes a second, for one global batch."""
    mesh = ptx.build_mesh(**sizes, device_type="cpu")
    tokens = torch.zeros(8, SEQ, dtype=torch.long)
    model = wrapped(ARGS, mesh, ac)
    count = estimate_flops_fake(model, tokens)
    rows = 8 // ptx.data_mesh(mesh).size()
    per_step = step_tokens(rows, SEQ, mesh)
    world = dist.get_world_size()
    return mfu(count, 1.0, 1e12, devices=world), hfu(count, 1.0, 1e12, devices=world), per_step


@distributed(world_size=4)
def test_P08_mfu_does_not_depend_on_tp_or_recomputation():
    meshes = [{"tp": 4}, {"tp": 2, "dp_shard": 2}, {"dp_shard": 4}, {"cp": 2, "tp": 2}, {"cp": 4}]
    kinds = itertools.cycle(("none", "full", "selective"))
    found = [utilisation(sizes, ac) for sizes, ac in zip(meshes, kinds)]
    mfus, hfus, tokens = (set(values) for values in zip(*found))
    assert len(mfus) == 1  # for equal time and batch
    assert len(hfus) == 3  # one for each kind of recomputation
    assert tokens == {8 * SEQ}


@distributed(world_size=2)
def test_collectives_of_the_models_own_are_refused():
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            dist.all_reduce(y)
            return y

    model = nn.Sequential(Sums())
    with pytest.raises(ValueError, match=r"all.?reduce.* communicates") as info:
        estimate_flops_fake(model, torch.randn(2, 8), backward=False)
    assert "module '0'" in str(info.value)
