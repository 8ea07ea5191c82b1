import copy
import dataclasses
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from collectives import CollectiveLog
from harness import distributed
from ptx.mesh import build_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan
from ptx.parallel._tp_styles import HeadParallel, Replicated

# Over 4 ranks: 2 kv heads are replicated, 13 rows split 4/4/4/1 and 3 rows leave a rank without any.
ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=13)
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True, "vocab_size": 3},
    "biases": {
        "n_kv_heads": 4,
        "qk_norm": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "1 kv head": {
        "n_kv_heads": 1,
        "qk_norm": True,
        "qkv_bias": True,
        "tie_embeddings": True,
        "sliding_window": 3,
        "nope_layers": (True, False),
    },
    "3 whole heads": {
        "n_heads": 3,
        "n_kv_heads": 1,
        "head_dim": 6,
        "qk_norm": True,
        "qkv_bias": True,
        "o_bias": True,
    },
}
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 13,
    "pad_token_id": 3,
    "use_cache": False,
}
LLAMA_VARIANTS = {
    "plain": ({}, ("tokens", "padding", "embeds")),
    "tied": (
        {"tie_word_embeddings": True, "attn_implementation": "eager"},
        ("body and head", "embeds"),
    ),
    "1 kv head": (
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        ("tokens", "padding"),
    ),
}


def build(args=ARGS, **changes):
    torch.manual_seed(0)
    return randomised(Transformer(dataclasses.replace(args, **changes)))


def build_llama(**changes):
    torch.manual_seed(0)
    return randomised(LlamaForCausalLM(LlamaConfig(**LLAMA | changes)))


def randomised(model):
    """Norms and biases away from 1 and 0, and scores that matter."""
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        else:
            nn.init.normal_(parameter, std=0.3)
    return model


def batch(vocab_size, rows=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (2, rows, 8), generator=generator)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(logits, labels):
    loss = F.cross_entropy(full(logits).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def assert_same(got, want, what):
    assert got.shape == want.shape, what
    error = float((got - want).detach().abs().max() / want.detach().abs().max())
    assert error <= 1e-5, f"{what}: {error}"


def assert_same_gradients(model, reference, what):
    for (name, got), (_, want) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert isinstance(got, DTensor), f"{what}: {name}"
        assert (got.grad is None) == (want.grad is None), f"{what}: gradient of {name}"
        if want.grad is not None:
            assert_same(full(got.grad), want.grad, f"{what}: gradient of {name}")


def assert_equal_on_all_ranks(tensor, what):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in others), what


@pytest.fixture
def fake_mesh():
    """A tp mesh of 4 in this process, for what has to fail before anything is communicated."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


# Exactness


@distributed(world_size=2)
def test_transformer_over_2_ranks():
    check_transformer(2, "plain", "tied", "1 kv head", "3 whole heads")


@distributed(world_size=4)
def test_transformer_over_4_ranks():
    check_transformer(4, "plain", "tied", "biases", "3 whole heads")


def check_transformer(tp, *variants):
    mesh = build_mesh(tp=tp, device_type="cpu")["tp"]
    for name in variants:
        changes = VARIANTS[name]
        reference = build(**changes)
        tokens, labels = batch(reference.args.vocab_size)
        want = backward(reference(tokens), labels)
        for sequence_parallel in (True, False):
            what = f"{name}, sequence_parallel={sequence_parallel}"
            model = build(**changes)
            plan = tp_plan(
                model, sequence_parallel=sequence_parallel, whole_attention="whole" in name
            )
            assert apply_tp(model, mesh, plan) is model
            logits = model(tokens)
            assert logits.placements == (Shard(2),)
            assert_same(backward(logits, labels), want, f"{what}: loss")
            assert_same_gradients(model, reference, what)
            tied = model.output.weight is model.tok_embeddings.weight
            assert tied == reference.args.tie_embeddings

            if name == "plain":
                hidden = model(tokens, return_hidden=True)
                assert isinstance(hidden, DTensor) == sequence_parallel
                if sequence_parallel:
                    assert hidden.placements == (Shard(1),)
                assert_same(full(hidden), reference(tokens, return_hidden=True), f"{what}: hidden")


@distributed(world_size=4)
def test_transformer_with_fsdp_equals_one_process():
    mesh = build_mesh(dp_shard=2, tp=2, device_type="cpu")
    rank = mesh["dp_shard"].get_local_rank()
    for name in ("plain", "1 kv head"):
        reference = build(**VARIANTS[name])
        tokens, labels = batch(reference.args.vocab_size, rows=4)
        backward(reference(tokens), labels)
        for sequence_parallel in (True, False):
            model = build(**VARIANTS[name])
            apply_tp(model, mesh["tp"], tp_plan(model, sequence_parallel=sequence_parallel))
            for block in model.layers.values():
                fully_shard(block, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
            if sequence_parallel:  # a refused batch leaves a model that goes on
                with pytest.raises(ValueError, match="7 positions don't split over tp=2"):
                    model(tokens[:, :7])
            hidden = model(tokens.chunk(2)[rank], return_hidden=True)  # no warning about a view
            assert full(hidden).shape == (2, 8, 16)
            backward(model(tokens.chunk(2)[rank]), labels.chunk(2)[rank])
            assert_same_gradients(model, reference, f"{name}, {sequence_parallel}")


@distributed(world_size=2)
def test_transformers_llama_over_2_ranks():
    check_llama(2, "plain", "tied")


@distributed(world_size=4)
def test_transformers_llama_over_4_ranks():
    check_llama(4, "plain", "1 kv head")


def check_llama(tp, *variants):
    mesh = build_mesh(tp=tp, device_type="cpu")["tp"]
    tokens, labels = batch(LLAMA["vocab_size"])
    padding = torch.ones_like(tokens)
    padding[1, 6:] = 0
    embeds = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def run(model, how):
        """The loss, and the gradient of embeds."""
        model.zero_grad()
        embeds.grad = None
        if how == "body and head":
            logits = model.lm_head(model.model(tokens).last_hidden_state)
        elif how == "embeds":
            logits = model(inputs_embeds=embeds).logits
        else:
            logits = model(tokens, attention_mask=padding if how == "padding" else None).logits
        assert logits.shape == (2, 8, 13)
        return backward(logits, labels), embeds.grad

    for name in variants:
        changes, hows = LLAMA_VARIANTS[name]
        reference = build_llama(**changes)
        for sequence_parallel in (True, False):
            model = build_llama(**changes)
            apply_tp(model, mesh, tp_plan(model, sequence_parallel=sequence_parallel))
            for how in hows:
                what = f"{name}, {how}, sequence_parallel={sequence_parallel}"
                (want, want_embeds), (got, got_embeds) = run(reference, how), run(model, how)
                assert_same(got, want, f"{what}: loss")
                assert_same_gradients(model, reference, what)
                if how == "embeds":
                    assert_same(got_embeds, want_embeds, what)
            assert model.config.num_key_value_heads == reference.config.num_key_value_heads


@distributed(world_size=2)
def test_transformers_llama_keeps_its_ways():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    tokens, _ = batch(LLAMA["vocab_size"])
    reference, model = build_llama(use_cache=True), apply_tp(build_llama(use_cache=True), mesh)
    want = reference(tokens, logits_to_keep=3).logits
    assert_same(full(model(tokens, logits_to_keep=3).logits), want, "logits_to_keep")
    with pytest.raises(ValueError, match="labels was passed"):
        model(tokens, labels=tokens)
    with pytest.raises(ValueError, match="output_hidden_states was passed"):
        model(tokens, output_hidden_states=True)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states was passed"):
        model.model(tokens)
    body = apply_tp(build_llama().model, mesh)
    assert_same(
        full(body(tokens).last_hidden_state), reference.model(tokens).last_hidden_state, "body"
    )


# Faults by id


def test_T01_kv_heads_that_dont_split_are_refused(fake_mesh):
    for model in (
        Transformer(ModelArgs(dim=24, n_layers=1, n_heads=12, n_kv_heads=3, vocab_size=8)),
        build_llama(hidden_size=24, num_attention_heads=12, num_key_value_heads=3),
    ):
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=r"3 kv heads and tp=4: neither divides the other"):
            apply_tp(model, fake_mesh)
        assert_untouched(model, before)


@distributed(world_size=2)
def test_T01_one_kv_head_over_two_ranks_is_exact():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    args = ModelArgs(dim=16, n_layers=1, n_heads=4, n_kv_heads=1, vocab_size=13, qkv_bias=True)
    reference, model = build(args), apply_tp(build(args), mesh)
    tokens, labels = batch(13)
    backward(reference(tokens), labels)
    backward(model(tokens), labels)
    assert_same_gradients(model, reference, "1 kv head")
    wk = model.layers["0"].attention.wk
    assert wk.weight.to_local().shape == (4, 16)  # whole, once in a norm over the DTensor
    assert_same(
        wk.weight.grad.full_tensor().norm(),
        reference.layers["0"].attention.wk.weight.grad.norm(),
        "norm",
    )


@distributed(world_size=2)
def test_T03_sequence_that_tp_does_not_divide():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    tokens, _ = batch(13)
    embeds = torch.ones(2, 8, 16)
    calls = {
        "tokens": lambda own, llama, n: own(tokens[:, :n]),
        "hidden": lambda own, llama, n: own(tokens[:, :n], return_hidden=True),
        "llama": lambda own, llama, n: llama(input_ids=tokens[:, :n]).logits,
        "body": lambda own, llama, n: llama.model(tokens[:, :n]).last_hidden_state,
        "embeds": lambda own, llama, n: llama(inputs_embeds=embeds[:, :n]).logits,
    }
    references = build(), build_llama()
    for sequence_parallel in (True, False):
        models = [
            apply_tp(m, mesh, tp_plan(m, sequence_parallel=sequence_parallel))
            for m in (build(), build_llama())
        ]
        for name, call in calls.items():
            for length in (5, 1, 4):
                if length % 2 and sequence_parallel:
                    message = rf"{length} positions don't split over tp=2"
                    with CollectiveLog() as log, pytest.raises(ValueError, match=message):
                        call(*models, length)
                    assert not log.calls
                else:
                    got, want = call(*models, length), call(*references, length)
                    assert_same(full(got), want, f"{name}, {length}")


@distributed(world_size=2)
def test_T04_norm_weights_stay_equal_on_all_ranks():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    for sequence_parallel, clip in ((True, False), (True, True), (False, True)):
        models = [build(n_layers=1, n_kv_heads=1, qk_norm=True) for _ in range(2)]
        reference, model = models
        apply_tp(model, mesh, tp_plan(model, sequence_parallel=sequence_parallel))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in models]
        for step in range(3):
            tokens, labels = batch(13).roll(step, dims=-1)
            for m, optimizer in zip(models, optimizers, strict=True):
                backward(m(tokens), labels)
                if clip:
                    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_same(full(got.detach()), want, name)
            if got.placements == (Replicate(),):
                assert_equal_on_all_ranks(got.detach().to_local(), name)


@distributed(world_size=2)
def test_T08_first_ranks_values_are_taken():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    want = build(qk_norm=True)
    for sequence_parallel in (True, False):
        model = build(qk_norm=True)
        with torch.no_grad():
            for parameter in model.parameters():  # ranks that drew differently
                parameter.add_(dist.get_rank())
        apply_tp(model, mesh, tp_plan(model, sequence_parallel=sequence_parallel))
        for (name, got), parameter in zip(model.named_parameters(), want.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), parameter), name
            if got.placements == (Replicate(),):
                assert_equal_on_all_ranks(got.detach().to_local(), name)


@distributed(world_size=2)
def test_T11_full_hidden_state_is_not_taken_for_a_part():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    hidden = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    own = apply_tp(build(), mesh)
    seen = []
    own.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    own(torch.zeros(2, 4, dtype=torch.int64))
    part, rope, mask = seen[0]
    assert part.shape == (2, 2, 16)
    assert own.layers["0"](part, rope, mask).shape == (2, 2, 16)
    with pytest.raises(ValueError, match=r"8 positions.* 4"):
        own.layers["0"](hidden, rope, mask)

    llama = apply_tp(build_llama(), mesh)
    tables = llama.model.rotary_emb(hidden, torch.arange(4)[None])
    block = llama.model.layers[1]
    assert block(hidden[:, :2], position_embeddings=tables).shape == (2, 2, 16)
    with pytest.raises(ValueError, match=r"8 positions over all ranks.* 4"):
        block(hidden, position_embeddings=tables)
    split = DTensor.from_local(hidden[:, :2].contiguous(), mesh, [Shard(1)])
    assert llama.model.layers[0](split, position_embeddings=tables).shape == (2, 2, 16)


def test_F01_ties_that_would_be_torn_are_refused(fake_mesh):
    model = build(tie_embeddings=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    plan = tp_plan(model)
    plan["tok_embeddings"] = ColwiseParallel(output_layouts=Shard(1))
    with pytest.raises(ValueError, match=r"tok_embeddings.weight Shard\(dim=1\)") as error:
        apply_tp(model, fake_mesh, plan)
    assert "output.weight Shard(dim=0)" in str(error.value)
    del plan["output"]
    with pytest.raises(ValueError, match=r"no key covers output.weight;"):
        apply_tp(model, fake_mesh, plan)
    assert_untouched(model, before)


# Refusals, all at once and before anything changes


def assert_untouched(model, before):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(model.get_parameter(name) is p for name, p in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_all_violations_are_listed_and_nothing_is_changed(fake_mesh):
    model = Transformer(
        ModelArgs(dim=12, n_layers=2, n_heads=6, n_kv_heads=3, hidden_dim=90, vocab_size=13)
    )
    before = dict(model.named_parameters())
    plan = tp_plan(model)
    plan["layer.*.feed_forward.w1"] = plan.pop("layers.*.feed_forward.w1")
    plan["layers.0.ffn_norm"] = SequenceParallel()
    plan["norm"] = RowwiseParallel()
    plan["layers.*.attention.wo"] = Shard(0)
    with pytest.raises(ValueError, match="the plan doesn't fit Transformer") as error:
        apply_tp(model, fake_mesh, plan)
    for line in (
        "'layer.*.feed_forward.w1' matches nothing; closest: 'layers.*.feed_forward.w1'",
        "'layers.*.ffn_norm' and 'layers.0.ffn_norm' both match 'layers.0.ffn_norm'",
        "'layers.*.attention.wo': Shard(dim=0) is no ParallelStyle",
        "layers.*.attention.wq: 6 heads don't split over tp=4",
        "layers.*.attention.wk: 3 kv heads and tp=4: neither divides the other",
        "layers.*.attention.wv: 3 kv heads and tp=4: neither divides the other",
        "layers.*.feed_forward.w2: 90 features don't split over tp=4",
        "layers.*.feed_forward.w3: 90 features don't split over tp=4",
        "norm: RowwiseParallel takes an nn.Linear or an nn.Embedding, not RMSNorm",
        "no key covers layers.*.attention.wo.weight, layers.*.feed_forward.w1.weight;",
    ):
        assert str(error.value).count(line) == 1, line
    assert len(str(error.value).splitlines()) == 11
    assert_untouched(model, before)


def test_wrong_meshes_models_and_orders_are_refused(fake_mesh):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"2 dims \('dp', 'tp'\); pass .* mesh\[\"tp\"\]"):
        apply_tp(build(), mesh)
    with pytest.raises(ValueError, match=r"no plan for Sequential, .* plan= of your own"):
        apply_tp(nn.Sequential(nn.Linear(4, 4)), mesh["tp"])
    with torch.device("meta"):
        model = apply_tp(Transformer(ARGS), mesh["tp"])
    with pytest.raises(ValueError, match="call apply_tp once"):
        apply_tp(model, mesh["tp"])
    wrapped = build()
    wrapped.layers["0"].compile()
    with pytest.raises(ValueError, match="apply_ac / apply_compile; call apply_tp before it"):
        apply_tp(wrapped, mesh["tp"])
    with pytest.raises(ValueError, match="apply_fsdp2; call apply_tp before it"):
        apply_tp(fully_shard(build(), mesh=mesh["dp"]), mesh["tp"])


def test_a_strangers_plan_is_checked(fake_mesh):
    class Stranger(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.up = nn.Linear(6, 10)
            self.down = nn.Linear(10, 6)
            self.head = nn.Linear(6, 10)

    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),  # unequal parts, but a DTensor
    }
    with pytest.raises(ValueError, match="doesn't fit Stranger") as error:
        apply_tp(Stranger(), fake_mesh, plan)
    assert [line[2:20] for line in str(error.value).splitlines()[1:]] == [
        "up: 10 features do",
        "down: 10 features ",
        "no key covers scal",
    ]
    own_forward = type("Lora", (nn.Linear,), {"forward": lambda self, x: x})
    with pytest.raises(ValueError, match=r"Lora has a forward of its own"):
        apply_tp(
            nn.ModuleDict({"k": own_forward(4, 4)}),
            fake_mesh,
            {"k": HeadParallel(2, replicate=True)},
        )


def test_over_one_rank_the_plan_is_checked_and_nothing_changes():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = build_mesh(device_type="cpu")["tp"]
        model = build()
        before = dict(model.named_parameters())
        assert apply_tp(model, mesh) is model
        with pytest.raises(ValueError, match=r"'layer.0' matches nothing"):
            apply_tp(model, mesh, tp_plan(model) | {"layer.0": Replicated()})
        assert_untouched(model, before)
    finally:
        dist.destroy_process_group()


# Traps it takes care of


@distributed(world_size=2)
def test_compiled_blocks_leave_the_embedding_its_gradient():
    # Dynamo looks at `.grad` of a block's input (torch 2.13).
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference, model = build(n_kv_heads=1), apply_tp(build(n_kv_heads=1), mesh)
    tokens, labels = batch(13)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    want = backward(reference(tokens), labels)
    assert_same(backward(model(tokens), labels), want, "loss")
    assert_same_gradients(model, reference, "compiled")
    assert counter.frame_count == 1  # replicated kv heads don't set blocks apart


@distributed(world_size=2)
def test_meta_models_are_sharded_without_communication():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    with torch.device("meta"), CollectiveLog() as log:
        model = apply_tp(Transformer(dataclasses.replace(ARGS, **VARIANTS["1 kv head"])), mesh)
    assert not log.calls
    assert model.output.weight is model.tok_embeddings.weight
    real = apply_tp(build(**VARIANTS["1 kv head"]), mesh)
    for (name, got), want in zip(model.named_parameters(), real.parameters(), strict=True):
        assert got.is_meta, name
        assert got.placements == want.placements, name
        assert got.to_local().shape == want.to_local().shape, name


@distributed(world_size=2)
def test_frozen_parameters_stay_frozen_and_copies_work():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference, model = build(n_kv_heads=1), build(n_kv_heads=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "tok" not in name)
    apply_tp(model, mesh)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "norm" not in n and "tok" not in n
    }
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tokens, _ = batch(13)
    assert_same(full(twin(tokens)), reference(tokens), "deepcopy")


@distributed(world_size=2)
def test_collectives_of_a_step():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    tokens, _ = batch(13)
    for changes in ({}, {"n_kv_heads": 1, "qk_norm": True}):
        for sequence_parallel in (True, False):
            model = build(**changes)
            apply_tp(model, mesh, tp_plan(model, sequence_parallel=sequence_parallel))
            with CollectiveLog() as log:
                logits = model(tokens)
            halves = 2 * len(model.layers)
            if sequence_parallel:  # gathers: each half block and the head; scatters: the embedding
                assert log.count("all_gather") == log.count("reduce_scatter") == halves + 1
                assert log.count() == 2 * (halves + 1), log.calls
            else:
                assert log.count("all_reduce") == log.count() == halves + 1
            with CollectiveLog() as log:
                logits.to_local().sum().backward()
            if sequence_parallel:
                assert log.count("all_gather") == log.count("reduce_scatter") == halves + 1
                assert log.count() == 2 * (halves + 1), log.calls
            else:
                assert log.count("all_reduce") == log.count() == halves + 1
