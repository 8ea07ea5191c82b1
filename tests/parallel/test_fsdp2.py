import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from collectives import CollectiveLog
from harness import distributed
from ptx._names import clean_named_parameters
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._blocks import find_blocks
from ptx.parallel._clip import clip_grad_norm_
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._tp import apply_tp

VOCAB, SEQ, PER_RANK = 61, 8, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def own(tie=False, **changes):
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "vocab_size": VOCAB}
    return Transformer(ModelArgs(tie_embeddings=tie, max_seq_len=SEQ + 1, **{**sizes, **changes}))


def llama(tie=False):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ + 1,
            tie_word_embeddings=tie,
            use_cache=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def t5():
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, dropout_rate=0.0, use_cache=False, **sizes, **ends)
    )


class Toy(nn.Module):
    """Embedding, blocks, head, and what models do that is awkward to shard."""

    def __init__(
        self, vocab=VOCAB, dim=6, tie=False, twice=False, frozen=(), share=False, transposed=False
    ):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 3), nn.Linear(3, dim), nn.Tanh()
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("shift", torch.randn(3, dim)[0])
        if tie:
            self.output.weight = self.tok_embeddings.weight
        if share:
            self.layers[1][0].weight = self.layers[0][0].weight
        if transposed:
            self.layers[0][2].weight = nn.Parameter(torch.randn(dim, 3).t())
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)
        self.twice = twice

    def forward(self, tokens, return_hidden=False):
        x = self.tok_embeddings(tokens) + self.shift
        for layer in [*self.layers, *self.layers] if self.twice else self.layers:
            x = x + layer(x)
        x = self.norm(x)
        return x if return_hidden else self.output(x)


def logits(model, tokens):
    if isinstance(model, T5ForConditionalGeneration):
        with warnings.catch_warnings():  # torch: T5's blocks return their position bias as a view
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return model(tokens, decoder_input_ids=tokens).logits
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def logits_by_head(model, tokens):
    """The head is called outside the forward of the rest."""
    if isinstance(model, LlamaForCausalLM):
        return model.lm_head(model.model(tokens).last_hidden_state)
    return model.output(model(tokens, return_hidden=True))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(got, want, rtol=1e-5):
    """max|difference| / max|reference|, as the design states exactness."""
    return (got - want).abs().max() <= rtol * want.abs().max()


def batch(ranks, step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(2, VOCAB, (PER_RANK * ranks, SEQ + 1), generator=generator)


def loss_of(call, model, tokens):
    logits = full(call(model, tokens[:, :-1])).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def assert_exact(build, mesh, call=logits, *, steps=1, wrap=lambda model, _: model, **options):
    """Train ``build()`` sharded, from a start that only rank 0 has, and compare with one process.

    Returns the collectives of the last step.
    """
    torch.manual_seed(0)
    reference = build()
    torch.manual_seed(dist.get_rank())
    model = wrap(build(), mesh)
    assert apply_fsdp2(model, fsdp_mesh(mesh), **options) is model
    rank, ranks = data_mesh(mesh).get_local_rank(), data_mesh(mesh).size()
    for step in range(steps):
        tokens = batch(ranks, step)
        mine = tokens[rank * PER_RANK : (rank + 1) * PER_RANK]
        want = loss_of(call, reference, tokens)
        want.backward()
        with CollectiveLog() as log:
            got = loss_of(call, model, mine)
            got.backward()
        losses = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, full(got.detach()))
        assert close(torch.stack(losses).mean(), want.detach()), (losses, want)
        # named_parameters gives each tied parameter once, under the same name on both sides
        gradients = {name: p.grad for name, p in clean_named_parameters(model)}
        assert gradients.keys() == dict(reference.named_parameters()).keys()
        for name, p in reference.named_parameters():
            assert (gradients[name] is None) == (p.grad is None), name
            assert p.grad is None or close(full(gradients[name]), p.grad), name
        for each in (model, reference):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
    return log


HEAD_AND_NORM = {"units": ["layers.*", ["norm", "output"]]}
EXACT = {
    "ZeRO-3": (own, logits, {}),
    "ZeRO-3, head alone": (own, logits_by_head, {}),
    "ZeRO-2": (own, logits_by_head, {"reshard_after_forward": False}),
    "over 2 neighbours": (own, logits_by_head, {"reshard_after_forward": 2}),
    "tied": (lambda: own(tie=True), logits, {}),
    "tied, head alone": (lambda: own(tie=True), logits_by_head, {}),
    "head with norm": (own, logits_by_head, HEAD_AND_NORM),
    "tied head with norm": (lambda: own(tie=True), logits_by_head, HEAD_AND_NORM),
    "nested units": (
        own,
        logits,
        {"units": ["layers.*", "layers.*.attention", ["layers.*.feed_forward"]]},
    ),
    "no units": (lambda: own(tie=True), logits_by_head, {"units": []}),
    "Llama": (llama, logits, {}),
    "Llama, head alone": (llama, logits_by_head, {}),
    "tied Llama": (lambda: llama(tie=True), logits, {}),
    "tied Llama, head alone": (lambda: llama(tie=True), logits_by_head, {}),
    "T5, tied four times": (t5, logits, {}),
    "uneven, not contiguous": (lambda: Toy(transposed=True), logits, {}),
    "twice": (lambda: Toy(twice=True), logits, {}),
    "shared by two blocks": (lambda: Toy(share=True), logits, {}),
    "frozen": (lambda: Toy(frozen=["layers.0", "layers.1.0", "tok_embeddings"]), logits, {}),
    "only the head trains": (
        lambda: Toy(frozen=["layers", "norm", "tok_embeddings"]),
        logits_by_head,
        {},
    ),
}


@distributed(world_size=4)
def test_loss_and_gradients_equal_one_process():
    mesh = build_mesh(device_type="cpu")
    for name, (build, call, options) in EXACT.items():
        try:
            assert_exact(build, mesh, call, **options)
        except Exception as error:
            raise AssertionError(name) from error


@distributed(world_size=4)
def test_hsdp_and_tp_equal_one_process():
    hsdp = build_mesh(dp_replicate=2, device_type="cpu")
    for tie in (False, True):
        assert_exact(lambda tie=tie: own(tie), hsdp, logits_by_head, steps=2)
    assert_exact(own, hsdp, reshard_after_forward=2)  # 2 is the whole shard dim
    with_tp = build_mesh(tp=2, device_type="cpu")

    for build, call in ((own, logits_by_head), (lambda: own(tie=True), logits)):
        assert_exact(build, with_tp, call, wrap=lambda model, mesh: apply_tp(model, mesh["tp"]))


@distributed(world_size=4)
def test_number_of_collectives():
    """Five groups: embedding, two blocks, head, root (the final norm)."""
    mesh = build_mesh(device_type="cpu")

    def count(build, call, mesh=mesh, **options):
        log = assert_exact(build, mesh, call, **options)
        kinds = ("allgather", "reduce_scatter", "allreduce")
        assert sum(map(log.count, kinds)) == log.count()
        return tuple(map(log.count, kinds))

    # True: embedding and blocks are gathered again in the backward, head and root are not.
    assert count(own, logits) == count(own, logits_by_head) == (8, 5, 0)
    assert count(own, logits_by_head, reshard_after_forward=False) == (5, 5, 0)
    # Four groups: the head is one with the embedding, and never reduced twice.
    assert count(lambda: own(tie=True), logits) == (6, 4, 0)
    assert count(lambda: own(tie=True), logits_by_head) == (7, 4, 0)
    hsdp = build_mesh(dp_replicate=2, device_type="cpu")
    assert count(own, logits_by_head, hsdp) == (8, 5, 5)


@distributed(world_size=2)
def test_F01_tied_embedding_and_head():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    for vocab in (6, 7):
        for units in (None, [], ["layers.*", "tok_embeddings"], [["output", "norm"]]):
            torch.manual_seed(0)
            reference = Toy(vocab, dim=4, tie=True)
            torch.manual_seed(0)
            model = apply_fsdp2(Toy(vocab, dim=4, tie=True), mesh, units=units)
            tokens = torch.arange(2 * vocab).reshape(2, vocab) % vocab
            F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten()).backward()
            mine = tokens[dist.get_rank()]
            F.cross_entropy(model(mine), mine).backward()
            weight = model.tok_embeddings.weight
            assert weight is model.output.weight
            assert sum(p is weight for p in model.parameters()) == 1
            assert close(full(weight.grad), reference.output.weight.grad)
            before = full(weight)[-1].clone()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            assert not torch.equal(full(weight)[-1], before)


@distributed(world_size=4)
def test_F06_ranks_cannot_start_apart():
    def gathered(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        shards = [None] * 4  # of unequal shapes, so as objects
        dist.all_gather_object(shards, local.detach())
        return shards

    torch.manual_seed(10)
    first = {**dict((t := Toy(vocab=8, dim=4)).named_parameters()), **dict(t.named_buffers())}
    for degrees in (
        {"dp_replicate": 2},
        {},
        {"tp": 2},
        {"tp": 2, "dp_replicate": 2, "dp_shard": 1},
    ):
        mesh = build_mesh(**degrees, device_type="cpu")
        torch.manual_seed(10 + dist.get_rank())
        model = Toy(vocab=8, dim=4)
        if mesh["tp"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            for layer in model.layers:
                # No broadcast over tp: what apply_fsdp2 does over its own mesh is tested.
                parallelize_module(layer, mesh["tp"], plan, src_data_rank=None)
        with CollectiveLog() as log:
            apply_fsdp2(model, fsdp_mesh(mesh))
        tensors = len([*model.parameters(), *model.buffers()])
        dims = sum(size > 1 for size in fsdp_mesh(mesh).shape)
        assert log.count() == log.count("broadcast") == tensors * dims
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            shards = gathered(tensor)
            if "dp_replicate" in degrees and mesh["tp"].size() == 1 and name != "shift":
                assert torch.equal(shards[0], shards[2]), name
                assert torch.equal(shards[1], shards[3]), name
            if "tp" not in degrees:
                assert torch.equal(full(tensor), first[name]), name
            elif "dp_replicate" in degrees:  # ranks 0, 2 and 1, 3 are the replicas
                assert torch.equal(shards[0], shards[2]), name
                assert torch.equal(shards[1], shards[3]), name


@distributed(world_size=2)
def test_meta_tensors_are_left_alone():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    with torch.device("meta"):
        model = own(tie=True)
    with CollectiveLog() as log:
        apply_fsdp2(model, mesh)
    assert log.count() == 0
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())

    torch.manual_seed(dist.get_rank())
    model = Toy()
    model.layers[0].to("meta")
    before = model.output.weight.detach().clone()
    apply_fsdp2(model, mesh)
    assert all(p.is_meta == name.startswith("layers.0.") for name, p in model.named_parameters())
    assert torch.equal(full(model.output.weight), before) == (dist.get_rank() == 0)


@distributed(world_size=4)
def test_F07_two_dim_mesh_is_hsdp():
    def rows(mesh):
        weight = apply_fsdp2(nn.Linear(3, 4, bias=False), mesh, units=[]).weight
        return weight.to_local().shape[0], weight.placements

    assert rows(fsdp_mesh(build_mesh(device_type="cpu"))) == (1, (Shard(0),))
    # Two dims that both shard are one dim of the view.
    assert rows(fsdp_mesh(build_mesh(dp_shard=2, cp=2, device_type="cpu"))) == (1, (Shard(0),))
    hsdp = fsdp_mesh(build_mesh(dp_replicate=2, device_type="cpu"))
    assert rows(hsdp) == (2, (Replicate(), Shard(0)))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert rows(named) == (2, (Replicate(), Shard(0)))

    whole = build_mesh(dp_shard=2, cp=2, device_type="cpu")
    for mesh in (
        whole,
        whole["dp_shard", "cp"],
        whole["tp"],
        whole["pp", "dp_shard"],
        init_device_mesh("cpu", (2, 2)),
        None,
    ):
        model = Toy()
        with pytest.raises(
            ValueError, match=r"apply_fsdp2: the mesh must .* pass ptx.fsdp_mesh\(mesh\)"
        ):
            apply_fsdp2(model, mesh)
        assert not isinstance(model.layers[0], FSDPModule)


@distributed(world_size=2)
def test_F10_forward_past_the_hooks():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)
    for build in (own, Toy):
        model = apply_fsdp2(build(), mesh)
        with pytest.raises(ValueError, match=r"forward was called past __call__.*model\(\.\.\.\)"):
            model.forward(tokens)
        model(tokens).sum().backward()
        with pytest.raises(ValueError, match="past __call__"):
            model.forward(tokens)
        model.output(model(tokens, return_hidden=True)).sum().backward()
    # The root is the inner model here, so the outer forward skips no hook.
    model = apply_fsdp2(llama(), mesh)
    torch.testing.assert_close(model.forward(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match=r"LlamaModel.forward was called past __call__"):
        apply_fsdp2(llama(), mesh).model.forward(tokens)


@distributed(world_size=2)
def test_bf16_policy():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)
    seen = []

    def spy(_, args, kwargs):
        tables = kwargs.get("position_embeddings") or (args[1].cos, args[1].sin)
        seen[:] = [tensor.dtype for tensor in (args[0], *tables)]

    for build in (own, llama):
        for call in (logits, logits_by_head):
            torch.manual_seed(0)
            reference = build()
            loss_of(call, reference, tokens).backward()
            torch.manual_seed(0)
            model = apply_fsdp2(build(), mesh, mp_policy=BF16)
            block = model.get_submodule(find_blocks(model)[0])
            block.register_forward_pre_hook(spy, with_kwargs=True)
            assert call(model, tokens).dtype == torch.bfloat16
            loss_of(call, model, tokens).backward()
            # transformers makes its tables in float32, and rounds them to the hidden states' dtype
            tables = torch.float32 if build is own else torch.bfloat16
            assert seen == [torch.bfloat16, tables, tables]
            for (name, got), want in zip(model.named_buffers(), reference.buffers()):
                assert torch.equal(got, want), name
            for (name, p), q in zip(model.named_parameters(), reference.parameters()):
                assert p.dtype == p.grad.dtype == torch.float32
                assert close(full(p.grad), q.grad, rtol=0.1), name


class Tables(nn.Module):
    """Computes a float32 table in its forward, and passes it on as tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(TableBlock() for _ in range(2))
        self.output = nn.Linear(4, 5)

    def forward(self, x):
        table = torch.arange(4.0)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, table, table=table)
        return self.output(x)


class TableBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x, first, table):
        assert first.dtype == table.dtype == torch.float32
        assert x.dtype == torch.bfloat16
        return self.linear(x)


@distributed(world_size=2)
def test_M05_casts_happen_at_the_entries_only():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    x = torch.randn(3, 4)
    model = apply_fsdp2(Tables(), mesh, mp_policy=BF16)
    assert model(x).dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for build, call in (
        (Tables, lambda model, _: model(x)),
        (own, logits),
        (own, logits_by_head),
        (lambda: own(tie=True), logits),
        (llama, logits),
        (llama, logits_by_head),
    ):
        model = apply_fsdp2(build(), mesh, mp_policy=policy)
        assert call(model, batch(1)).dtype == torch.float32
    # Alone, a head that shares its group answers in param_dtype; in the forward the root casts.
    model = apply_fsdp2(own(tie=True), mesh, mp_policy=policy)
    assert model.output(model(batch(1), return_hidden=True)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"output_dtype=torch.float32 can't be kept, as 'lm_head'"):
        apply_fsdp2(llama(tie=True), mesh, mp_policy=policy)


@distributed(world_size=4)
def test_checkpointed_and_compiled_blocks_come_before():
    mesh = build_mesh(device_type="cpu")

    def wrapped(model, _):
        for name, block in model.layers.items():
            model.layers[name] = checkpoint_wrapper(block)
        model.layers["1"].compile(backend="eager")
        return model

    log = assert_exact(own, mesh, logits, wrap=wrapped)
    assert (log.count("allgather"), log.count("reduce_scatter")) == (8, 5)
    model = apply_fsdp2(wrapped(own(), mesh), fsdp_mesh(mesh))
    assert all(isinstance(block, FSDPModule) for block in model.layers.values())
    with pytest.raises(ValueError, match="apply_fsdp2: the model already went through apply_fsdp2"):
        apply_fsdp2(model, fsdp_mesh(mesh))


@distributed(world_size=8)
def test_int_needs_a_mesh_over_all_ranks():
    """torch makes the groups of an int on these ranks only, and would hang."""
    mesh = build_mesh(dp_shard=4, tp=2, device_type="cpu")
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 needs a mesh over all 8 ranks"):
        apply_fsdp2(own(), fsdp_mesh(mesh), reshard_after_forward=2)


@pytest.mark.parametrize("frozen", ["layers.0", "output"])
@distributed(world_size=2)
def test_a_group_that_is_unfrozen_later_keeps_the_dtypes_of_the_policy(frozen):
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    results = []
    for freeze in (True, False):
        torch.manual_seed(0)
        model = own()
        model.get_submodule(frozen).requires_grad_(not freeze)
        apply_fsdp2(model, mesh, mp_policy=BF16)
        for _ in range(2):
            model.zero_grad()
            model(torch.arange(8)[None]).float().square().mean().backward()
            model.requires_grad_(True)
        results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


@distributed(world_size=2)
def test_conjugated_buffers_start_together():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    model = nn.Linear(4, 4)
    angles = torch.arange(4.0) + dist.get_rank()
    model.register_buffer("turns", torch.polar(torch.ones(4), angles).conj())
    model.register_buffer("sines", model.turns.imag)  # a pending negation
    apply_fsdp2(model, mesh, units=[])
    torch.testing.assert_close(model.turns, torch.polar(torch.ones(4), -torch.arange(4.0)))
    torch.testing.assert_close(model.sines, -torch.arange(4.0).sin())


@distributed(world_size=1)
def test_one_rank_is_wrapped_too():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    for flag in (True, False, 4):
        torch.manual_seed(0)
        model = apply_fsdp2(own(), mesh, mp_policy=BF16, reshard_after_forward=flag)
        assert isinstance(model, FSDPModule)
        out = model(batch(1))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert model.output.weight.grad.dtype == torch.float32


@distributed(world_size=2)
def test_wrong_arguments():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))

    def refused(model, message, **options):
        with CollectiveLog() as log, pytest.raises(ValueError, match=f"apply_fsdp2: {message}"):
            apply_fsdp2(model, mesh, **options)
        assert log.count() == 0
        assert not any(isinstance(module, FSDPModule) for module in model.modules())

    refused(
        own(),
        r"'layer.\*' matches nothing; closest: 'layers.\*'; 'norm' is named twice",
        units=["layer.*", "norm", "norm"],
    )
    refused(
        own(),
        r"none of the units \['layers.0.attention.core'\] has parameters",
        units=["layers.0.attention.core"],
    )
    refused(own(), "head: 'lm_head' matches nothing; closest: ", head="lm_head")
    refused(own(), r"head='out\*' must be one name; did you mean 'output'", head="out*")
    refused(own(), "head=Linear is no submodule of Transformer; pass", head=nn.Linear(2, 2))
    refused(own(), "head='layers' is a ModuleDict, never called itself", head="layers")
    refused(own(), "head='layers.0.attention.core' is a .* without", head="layers.0.attention.core")
    refused((model := own()), "units are names, not Linear; write 'output'", units=[model.output])
    refused(
        own(),
        r"reshard_after_forward=3 must be .* divides the shard dim, 2; CPUOffloadPolicy needs",
        reshard_after_forward=3,
        offload_policy=CPUOffloadPolicy(),
    )
    sparse = own()
    sparse.register_buffer("graph", torch.eye(3).to_sparse())
    refused(sparse, r"buffers \['graph'\] are sparse")
    table = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4))
    refused(table, r"\['0'\] write to their weight \(max_norm\)", units=[])
    for wrong in (1, 0, -2, "always", None):
        refused(own(), "reshard_after_forward=", reshard_after_forward=wrong)
    refused(
        own(),
        r"units .*'layers.1.attention'\], .* lie inside each other",
        units=[["layers.0", "layers.1.attention"], ["layers.1", "layers.0.attention"]],
    )

    scalar = Toy()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    scalar.layers[0][0].to(torch.bfloat16)
    refused(
        scalar,
        r"\['scale'\] have no dim to shard; give them shape \[1\];"
        r" \['layers.0'\] mixes trainable torch.bfloat16 and torch.float32",
    )
    empty = Toy()
    empty.norm.nothing = nn.Parameter(torch.zeros(0, 4))
    refused(empty, r"\['norm.nothing'\] have no elements")
    scalar = Toy()
    scalar.norm.to(torch.bfloat16)
    scalar.hidden = nn.Parameter(torch.zeros(1))
    refused(scalar, "what no unit holds mixes")

    tied = Toy()
    tied.list = nn.ParameterList([tied.norm.weight])
    refused(tied, "'norm', 'list' share a parameter but", units=["norm"])
    tied = Toy()
    tied.bias = tied.layers[0][0].bias  # held by the root and by a block
    refused(tied, "'', 'layers.0.0' share a parameter but can't be in one group")
    tied = Toy()
    tied.layers[0][0].bias = tied.layers[0][2].weight = nn.Parameter(torch.zeros(6))
    refused(tied, "'layers.0.0', 'layers.0.2' share a parameter", units=["layers.0", "layers.0.0"])


@distributed(world_size=2)
def test_head_is_found_named_or_unknown():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))

    class Other(Toy):
        def __init__(self):
            super().__init__()
            self.classifier = self.output
            del self.output

        def forward(self, tokens):
            return self.classifier(super().forward(tokens, return_hidden=True))

    def kept(head):
        model = Other()
        apply_fsdp2(model, mesh, head=head(model))
        model(batch(1))
        return not isinstance(model.classifier.weight, DTensor)

    assert kept(lambda model: "classifier")
    assert kept(lambda model: model.classifier)
    model = Other()
    units = ["layers.*", "classifier"]
    apply_fsdp2(model, mesh, units=units)
    model(batch(1))
    assert isinstance(model.classifier.weight, DTensor)  # no head known: no exception

    middle = own()  # a pipeline part
    middle.tok_embeddings = middle.norm = middle.output = None
    hidden = apply_fsdp2(middle, mesh, mp_policy=BF16)(torch.randn(1, SEQ, 16))
    assert hidden.dtype == torch.bfloat16


class Heads(nn.Module):
    """Its ``output`` is a list of heads, or of matrices: no module that is called."""

    def __init__(self, matrices=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Tanh()) for _ in range(2)
        )
        self.output = (
            nn.ParameterList([nn.Parameter(torch.randn(VOCAB, 6)), torch.randn(VOCAB, 6)])
            if matrices
            else nn.ModuleList(nn.Linear(6, VOCAB) for _ in range(2))
        )

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x)
        first, second = self.output
        return x @ (first + second).t() if torch.is_tensor(first) else first(x) + second(x)


@distributed(world_size=2)
def test_an_output_that_is_a_list_is_no_head():
    mesh = build_mesh(device_type="cpu")
    for matrices in (False, True):
        assert_exact(lambda m=matrices: Heads(m), mesh)
        model = Heads(matrices)
        with pytest.raises(ValueError, match=r"head='output' is a .*List, never called itself"):
            apply_fsdp2(model, fsdp_mesh(mesh), head="output")
        apply_fsdp2(model, fsdp_mesh(mesh))  # nothing was changed


@pytest.mark.gpu
def test_cpu_offload_on_an_accelerator():
    mesh = fsdp_mesh(build_mesh())
    try:
        torch.manual_seed(0)
        reference = own()
        torch.manual_seed(0)
        model = apply_fsdp2(own(), mesh, offload_policy=CPUOffloadPolicy())
        tokens = batch(1)
        loss_of(logits, reference, tokens).backward()
        loss_of(logits, model, tokens.to(mesh.device_type)).backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            assert p.device.type == p.grad.device.type == "cpu"
            assert close(full(p.grad), q.grad, rtol=1e-4)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm.cpu(), want, rtol=1e-4, atol=0)
    finally:
        dist.destroy_process_group()


class Experts(nn.Module):
    """Each sample goes to one of the experts, which may get none."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x, route):
        for experts in self.layers:
            parts = [expert(x[route == i]) for i, expert in enumerate(experts) if i in route]
            x = x + torch.cat(parts)
        return x


@pytest.mark.parametrize("routes", [[[0, 0], [1, 1]], [[0, 1], [1, 1]]], ids=["equal", "unequal"])
@distributed(world_size=2)
def test_ranks_that_use_different_parameters_are_exact_once_torch_is_told(routes):
    """As docs/fsdp2.md says; without it the first is silently wrong and the second aborts."""
    torch.manual_seed(0)
    reference, inputs = Experts(), torch.randn(2, 2, 4)
    for x, route in zip(inputs, routes):
        (reference(x, torch.tensor(route)).square().sum() / 2).backward()

    torch.manual_seed(0)
    mesh = build_mesh(device_type="cpu")
    model = apply_fsdp2(Experts(), fsdp_mesh(mesh), units=[["layers.*.*"]])
    model.set_reduce_scatter_unused_params(True)
    rank = dist.get_rank()
    model(inputs[rank], torch.tensor(routes[rank])).square().sum().backward()
    for (name, got), want in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=name)
