"""`materialize`: the same weights on every mesh, right buffers, kept ties, and refusals instead of garbage."""

import hashlib
import math
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.init
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.init import trunc_normal_  # a copy of the name, as user code has
from torch.nn.utils import prune
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPTextConfig,
    CLIPTextModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5ForConditionalGeneration,
)

from harness import distributed, run
from ptx._names import clean_name
from ptx.mesh import build_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel import _init_draw, _init_place, apply_fsdp2, apply_tp, materialize
from ptx.parallel._init_classes import _original, original_classes
from ptx.parallel._materialize import _offloaded
from ptx.parallel._tp_styles import HeadParallel, Replicated

MESHES = {
    "dp_shard 2": dict(dp_shard=2),
    "tp 2": dict(tp=2),
    "dp_shard 4": dict(dp_shard=4),
    "tp 4": dict(tp=4),
    "dp_shard 2 x tp 2": dict(dp_shard=2, tp=2),
    "HSDP 2 x 2": dict(dp_replicate=2, dp_shard=2),
    "HSDP 2 x 1 x tp 2": dict(dp_replicate=2, dp_shard=1, tp=2),
}
ROWS = 13  # over 4 ranks: 4, 4, 4, 1; over tp 2 x fsdp 2: 4, 3, 3, 3


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", self.compute(), persistent=False)
        self.register_buffer("limit", torch.tensor(64))

    def compute(self):
        return 10.0 ** (-torch.arange(0, 8, 2) / 8)

    def reset_parameters(self):
        self.inv_freq.copy_(self.compute())
        self.limit.fill_(64)


class Experts(nn.Module):
    """Initialised in slices, transposed, and with arithmetic."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(5, ROWS, 6))
        self.scale = nn.Parameter(torch.empty(ROWS))
        self.eye = nn.Parameter(torch.empty(ROWS, 7))

    def reset_parameters(self):
        for i, w in enumerate(self.w.unbind(0)):
            trunc_normal_(w.T, std=0.1 * (i + 1), a=-0.2, b=0.3)
        self.w.data[1:3, 2:, 3].mul_(2).add_(1)
        with torch.no_grad():
            self.scale.copy_(torch.arange(ROWS).log1p())
            self.scale[4] = -1
        nn.init.eye_(self.eye)


class Small(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.big = nn.Parameter(torch.empty(600, 1026))  # several blocks
        self.emb = nn.Embedding(ROWS, 8, padding_idx=2)
        self.fc1 = nn.Linear(8, ROWS)
        self.fc2 = nn.Linear(ROWS, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.rotary = Rotary()
        self.experts = Experts()
        self.head = nn.Linear(8, ROWS, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def reset_parameters(self):
        nn.init.normal_(self.big)


# By the end of the name: the dim that tp splits; what isn't here is kept whole.
TP = {
    **{f"{name}.weight": 0 for name in ("emb", "head", "fc1", "embed_tokens", "wte", "c_proj")},
    **{f"{name}_proj.weight": 0 for name in ("q", "k", "v", "gate", "up")},
    **{f"{name}.weight": 1 for name in ("fc2", "o_proj", "down_proj", "c_attn", "c_fc")},
    "fc1.bias": 0,
    "experts.w": 1,
    "experts.eye": 0,
    "big": 1,
}


def split_by_name(model, tp):
    """What apply_tp does to parameters, for any model."""
    made = {}
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        dim = next((d for end, d in TP.items() if name.endswith(end)), None)
        placement = Replicate() if dim is None else Shard(dim)
        if p not in made:
            made[p] = nn.Parameter(distribute_tensor(p, tp, [placement]))
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner).register_parameter(key, made[p])


SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=ROWS, hidden_dim=24)
MODELS = {
    "small": lambda: Small(tied=False),
    "small tied": lambda: Small(tied=True),
    "transformer": lambda: Transformer(ARGS),
    "transformer tied": lambda: Transformer(ModelArgs(**vars(ARGS) | {"tie_embeddings": True})),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=ROWS, pad_token_id=0)
    ),
    "qwen3 tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES, num_key_value_heads=2, head_dim=8, vocab_size=ROWS, tie_word_embeddings=True
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=ROWS, bos_token_id=0, eos_token_id=0)
    ),
}


def on_meta(make):
    with torch.device("meta"):
        return make()


def sharded(kind, mesh):
    model = on_meta(MODELS[kind])
    if mesh["tp"].size() > 1:
        if isinstance(model, Transformer | LlamaForCausalLM):
            apply_tp(model, mesh["tp"])
        else:
            split_by_name(model, mesh["tp"])
    if not isinstance(model, Small):
        return apply_fsdp2(model, fsdp_mesh(mesh))
    if fsdp_mesh(mesh).size() > 1:  # torch's own, and sometimes none
        tied = model.head.weight is model.emb.weight
        fully_shard([model.emb, model.head] if tied else model.emb, mesh=fsdp_mesh(mesh))
        fully_shard(model, mesh=fsdp_mesh(mesh))
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hashes(model):
    """Name -> hash of the full tensor, of parameters and buffers, tied ones under each name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    bytes_ = {n: whole(t.detach()).contiguous().view(-1).view(torch.uint8) for n, t in named}
    return {n: hashlib.sha256(b.numpy().tobytes()).hexdigest() for n, b in bytes_.items()}


def kinds_on(mesh_name):
    # tests/test_equivalence.py has own and transformers Llama on every mesh as well.
    broad = ("tp 2", "dp_shard 2 x tp 2", "HSDP 2 x 2")
    return [k for k in MODELS if k.startswith("small") or mesh_name in broad]


def materialize_on(mesh_names):
    torch.manual_seed(100 + dist.get_rank())
    state = torch.get_rng_state()
    found = {}
    for name in mesh_names:
        mesh = build_mesh(**MESHES[name], device_type="cpu")
        for kind in kinds_on(name):
            model = materialize(sharded(kind, mesh), "cpu", seed=7)
            assert isinstance(next(model.parameters()), DTensor)
            found[name, kind] = hashes(model)
    assert torch.equal(torch.get_rng_state(), state)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mesh_has_the_weights_of_one_process(world_size):
    names = [n for n, sizes in MESHES.items() if math.prod(sizes.values()) == world_size]
    want = {k: hashes(materialize(on_meta(make), "cpu", seed=7)) for k, make in MODELS.items()}
    for found in run(materialize_on, world_size, names):
        assert list(found) == [(name, kind) for name in names for kind in kinds_on(name)]
        for (name, kind), got in found.items():
            assert got == want[kind], f"{kind} on {name}"


def test_seed_and_name_matter():
    a, b, c = (materialize(nn.Linear(8, 8, device="meta"), "cpu", seed=s) for s in (0, 0, 1))
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, c.weight)
    m = materialize(on_meta(One), "cpu", seed=0, init=lambda m: [w.normal_() for w in m.w])
    assert m.w.unique().numel() == m.w.numel()  # each draw is another
    pair = materialize(
        nn.Sequential(*[nn.Linear(8, 8, device="meta") for _ in "ab"]), "cpu", seed=0
    )
    assert not torch.equal(pair[0].weight, pair[1].weight)
    # torch's CPU generator takes 0 and 2**32 for the same seed.
    d = materialize(nn.Linear(8, 8, device="meta"), "cpu", seed=2**32)
    assert not torch.equal(d.weight, a.weight)


def test_golden():
    """Another block size, key or generator changes everyone's weights: it must not happen by accident."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.uniform = nn.Parameter(torch.empty(300, 1000))
            self.normal = nn.Parameter(torch.empty(300, 1000))
            self.trunc = nn.Parameter(torch.empty(300, 1000))

        def init_weights(self):
            nn.init.uniform_(self.uniform, -1, 1)
            nn.init.normal_(self.normal)
            nn.init.trunc_normal_(self.trunc)

    model = materialize(on_meta(Model), "cpu", seed=1234)
    # Exact on any CPU; the others go through functions that may differ in the last bit.
    sha256 = "f692de206ec4f3d1a4680da538cfbaa61dc8ac7cc23c94c15bea13250b3cfb8e"
    assert hashes(model)["uniform"] == sha256
    pinned = {
        "normal": [-1.807263, -1.130233, 1.051314, -1.48525, 0.502921],
        "trunc": [0.035253, -0.292341, -0.170449, -1.754281, 0.403555],
    }
    for name, want in pinned.items():
        got = model.get_parameter(name)[[0, 0, 261, 262, 299], [0, 1, 999, 144, 999]]
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("block", [1, 5, 24, 1000])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 1, 4), (3, 4, 5)])
def test_any_shard_gets_its_part_of_the_whole(shape, block, monkeypatch):
    monkeypatch.setattr(_init_draw, "BLOCK", block)

    def draw(local, offsets, view):
        region = _init_draw.region_of(view, shape)
        fill = lambda b, g: b.normal_(generator=g) if b.numel() <= block else 1 / 0  # noqa: E731
        _init_draw.draw(local, offsets, region=region, fill=fill, key=(0, "w", 0))
        return local

    base = torch.empty(shape, device="meta")
    for view in (base, base.permute(list(reversed(range(base.ndim))))):
        full = draw(torch.full(shape, torch.nan), (0,) * len(shape), view)
        assert not full.isnan().any()
        assert full.unique().numel() == full.numel()
        for dim, length in enumerate(shape):
            for start in range(length):
                part = full.narrow(dim, start, min(2, length - start))
                offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
                assert torch.equal(draw(torch.empty_like(part), offsets, view), part)


def test_views_are_boxes_or_refused():
    base = torch.empty(4, 1, 6, 5, device="meta")
    boxes = {
        "all": (base, (0, 0, 0, 0), (4, 1, 6, 5)),
        "index": (base[2, 0, 3], (2, 0, 3, 0), (1, 1, 1, 5)),
        "slices": (base[1:3, :, 2:].transpose(0, 3), (1, 0, 2, 0), (2, 1, 4, 5)),
        "unsqueezed": (base.squeeze(1)[:, None, 5:], (0, 0, 5, 0), (4, 1, 1, 5)),
    }
    for name, (view, start, size) in boxes.items():
        region = _init_draw.region_of(view, tuple(base.shape))
        assert (region.start, region.size) == (start, size), name
    strided = base.as_strided((2, 2), (1, 1))
    for view in (base[::2], base.flatten(), base[1:].flatten(2), base.expand(4, 3, 6, 5), strided):
        assert _init_draw.region_of(view, tuple(base.shape)) is None, view.stride()


@distributed(world_size=2)
def test_T08_shards_differ_and_replicas_agree():
    torch.manual_seed(100 + dist.get_rank())
    mesh = build_mesh(dp_shard=2, device_type="cpu")
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    fully_shard(model, mesh=fsdp_mesh(mesh))
    torch.manual_seed(dist.get_rank())
    materialize(model, "cpu", seed=0)
    full = model[0].weight.full_tensor()
    assert not torch.equal(full[:4], full[4:])
    for dim in (0, 1):  # a replicated bias, a weight sharded either way
        other = on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
        tp = build_mesh(tp=2, device_type="cpu")["tp"]
        linear = other[0]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, tp, [Shard(dim)]))
        linear.bias = nn.Parameter(distribute_tensor(linear.bias, tp, [Replicate()]))
        materialize(other, "cpu", seed=0)
        assert torch.equal(linear.weight.full_tensor(), full)
        both = [torch.empty(8) for _ in range(2)]
        dist.all_gather(both, linear.bias.to_local().detach())
        assert torch.equal(both[0], both[1])


@distributed(world_size=4)
def test_F06_hsdp_replicas_start_equal():
    torch.manual_seed(10 + dist.get_rank())
    mesh = fsdp_mesh(build_mesh(dp_replicate=2, dp_shard=2, device_type="cpu"))
    model = on_meta(lambda: Small(tied=True))
    fully_shard(model, mesh=mesh)
    materialize(model, "cpu", seed=3)
    for name, p in model.named_parameters():
        local = p.to_local().detach().float().contiguous()
        both = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(both, local, group=mesh.get_group(0))
        assert torch.equal(both[0], both[1]), name


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("kind", MODELS)
def test_F02_buffers_equal_those_of_a_model_built_normally(kind, seed):
    want = dict(MODELS[kind]().named_buffers())
    model = materialize(on_meta(MODELS[kind]), "cpu", seed=seed)
    got = dict(model.named_buffers())
    assert got.keys() == want.keys()
    for name, buffer in want.items():
        assert got[name].dtype == buffer.dtype
        assert torch.equal(got[name], buffer), name


@distributed(world_size=2)
def test_F02_buffers_under_fsdp_and_tp():
    want = dict(Small(tied=False).named_buffers())
    for sizes in (dict(dp_shard=2), dict(tp=2)):
        mesh = build_mesh(**sizes, device_type="cpu")
        for seed in (0, None):
            model = on_meta(lambda: Small(tied=False))
            # What distribute_module does to buffers.
            model.rotary.inv_freq = distribute_tensor(
                model.rotary.inv_freq, mesh["tp"], [Replicate()]
            )
            if sizes == dict(tp=2):
                split_by_name(model, mesh["tp"])
            else:
                fully_shard(model, mesh=fsdp_mesh(mesh))
            materialize(model, "cpu", seed=seed)
            for name, buffer in model.named_buffers():
                assert torch.equal(whole(buffer), want[name]), name
            assert isinstance(model.rotary.inv_freq, DTensor)


class Stranger(nn.Module):
    """Computes its buffer where it is built, and nowhere else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)


@pytest.mark.parametrize("seed", [0, None])
def test_F02_a_buffer_that_nothing_restores_is_named(seed):
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Stranger()))
    with pytest.raises(ValueError, match=r"1\.freqs: nothing writes all of this buffer"):
        materialize(model, "cpu", seed=seed)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])

    def init(model):
        model[0].reset_parameters()
        model[1].freqs = torch.arange(4.0)

    materialize(model, "cpu", seed=seed, init=init)
    assert torch.equal(model[1].freqs, torch.arange(4.0))
    assert "freqs" in model[1]._non_persistent_buffers_set


def writes(body):
    """An `init` that runs ``body`` on a Stranger's buffer."""
    return lambda model: body(model.freqs)


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (writes(lambda b: b[1:].fill_(0)), "nothing writes all of this buffer"),
        (writes(lambda b: b.mul_(2)), "reads buffer 'freqs' before"),
        (writes(lambda b: b.copy_(b + 1)), "reads buffer 'freqs' before"),
        (writes(lambda b: b.copy_(torch.randn(4))), r"aten.randn.* draws outside .*"),
        (writes(lambda b: b.copy_(torch.empty(4, device="meta"))), None),
        (writes(lambda b: b[:2].normal_()), "draws buffer 'freqs', or a part"),
        (writes(lambda b: torch.empty_like(b)), "nothing writes all of this buffer"),
        (lambda m: setattr(m, "freqs", torch.empty(4, device="meta")), "nothing writes all"),
        (lambda m: m._buffers.pop("freqs"), "initialisation removes it"),
    ],
)
def test_garbage_in_a_buffer_is_refused(init, words):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        materialize(on_meta(Stranger), "cpu", seed=0, init=init)


@pytest.mark.parametrize(
    "init",
    [
        writes(lambda b: b.zero_()[1:].copy_(torch.arange(1.0, 4))),
        writes(lambda b: b.view(2, 2).copy_(torch.arange(4.0).view(2, 2))),
        writes(lambda b: torch.arange(4.0, out=b)),
        lambda m: m.register_buffer("freqs", torch.arange(4.0), persistent=False),
        lambda m: setattr(m.freqs, "data", torch.arange(4.0)),
    ],
)
def test_ways_to_write_a_buffer(init):
    assert torch.equal(
        materialize(on_meta(Stranger), "cpu", seed=0, init=init).freqs, torch.arange(4.0)
    )


def test_random_buffers_are_keyed_and_need_a_seed():
    init = writes(lambda b: b.normal_())
    a, b = (materialize(on_meta(Stranger), "cpu", seed=5, init=init).freqs for _ in range(2))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="seed is None"):
        materialize(on_meta(Stranger), "cpu", seed=None, init=init)


def test_batch_norm_and_attention_of_torch():
    def make():
        return nn.Sequential(nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2), nn.Conv2d(2, 2, 3))

    model, want = materialize(on_meta(make), "cpu", seed=0), make()
    for name, buffer in want.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert torch.equal(model[1].out_proj.bias, want[1].out_proj.bias)  # zero, by the parent


@pytest.mark.parametrize("seed", [0, None])
def test_ties_identity_and_attributes_are_kept(seed):
    model = on_meta(lambda: Small(tied=True))
    before = dict(model.named_parameters(remove_duplicate=False))
    model.fc1.weight.no_decay = True
    model.norm.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # too early in torch, right here
    materialize(model, "cpu", seed=seed)
    assert model.head.weight is model.emb.weight
    assert len(dict(model.named_parameters())) == len(before) - 1
    for name, p in model.named_parameters(remove_duplicate=False):
        assert p is before[name], name
        assert not p.is_meta
        assert type(p) is nn.Parameter
    assert model.fc1.weight.no_decay
    assert not model.norm.weight.requires_grad
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in model.parameters()
    }


def test_tied_weights_come_from_the_first_module():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(50, 40)
            self.head = nn.Linear(40, 50)
            self.head.weight = self.emb.weight

    weight = materialize(on_meta(Tied), "cpu", seed=0).head.weight
    assert 0.9 < weight.std() < 1.1  # the embedding's; a Linear's has 0.09
    alone = materialize(nn.ModuleDict({"emb": nn.Embedding(50, 40, device="meta")}), "cpu", seed=0)
    assert torch.equal(alone["emb"].weight, weight)


def test_real_tensors_keep_their_values():
    model = on_meta(lambda: Small(tied=False))
    model.fc1 = nn.Linear(8, ROWS)
    model.rotary.inv_freq = torch.full((4,), 9.0)
    weight, value = model.fc1.weight, model.fc1.weight.clone()
    materialize(model, "cpu", seed=7)
    assert model.fc1.weight is weight
    assert torch.equal(weight, value)
    assert torch.equal(model.rotary.inv_freq, torch.full((4,), 9.0))
    assert model.rotary.limit == 64
    want = materialize(on_meta(lambda: Small(tied=False)), "cpu", seed=7)
    assert torch.equal(model.fc2.weight, want.fc2.weight)

    before = hashes(model)
    assert materialize(model, "cpu", seed=8) is model
    assert hashes(model) == before


def test_seed_none_leaves_nan_for_what_no_load_fills():
    model = materialize(on_meta(lambda: Small(tied=False)), "cpu", seed=None)
    assert all(p.isnan().all() for p in model.parameters())


def test_bf16_weights_are_the_fp32_ones_rounded():
    def make(dtype):
        return lambda: nn.Sequential(
            nn.Linear(64, 64, dtype=dtype), nn.Embedding(9, 9, dtype=dtype)
        )

    fp32, bf16 = (
        materialize(on_meta(make(t)), "cpu", seed=0) for t in (torch.float32, torch.bfloat16)
    )
    for a, b in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b)


class Compiled(nn.Module):
    """Like what torch.compile returns, without its 2 s of imports."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def __getattr__(self, name):
        inner = self._modules["_orig_mod"]
        return inner if name == "_orig_mod" else getattr(inner, name)


@pytest.mark.parametrize("kind", ["small tied", "transformer", "llama"])
def test_wrappers_change_nothing(kind):
    want = hashes(materialize(on_meta(MODELS[kind]), "cpu", seed=0))
    model = on_meta(MODELS[kind])
    for wrap, owners in ((Compiled, (nn.LayerNorm, Experts)), (checkpoint_wrapper, nn.Linear)):
        for owner in [m for m in model.modules() if not isinstance(m, owners)]:
            for name, child in owner.named_children():
                if isinstance(child, owners):
                    setattr(owner, name, wrap(child))
    model = checkpoint_wrapper(Compiled(model))
    materialize(model, "cpu", seed=0)
    assert {clean_name(name): value for name, value in hashes(model).items()} == want


def test_transformers_inside_another_module_and_again_after_a_failure():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = MODELS["llama"]()
            self.value = nn.Linear(16, 1)
            self.other = Stranger()

    model = on_meta(Wrapper)
    with pytest.raises(ValueError, match=r"other\.freqs"):
        materialize(model, "cpu", seed=7)
    model.other = nn.Identity()
    materialize(model, "cpu", seed=7)
    assert not model.lm.model.layers[0].mlp.up_proj.weight.isnan().any()
    assert abs(model.lm.lm_head.weight.std() - 0.02) < 0.005


IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
FAMILIES = {
    # Formulas in modules without parameters of their own.
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=ROWS)
    ),
    "clip text": lambda: CLIPTextModel(
        CLIPTextConfig(**SIZES, vocab_size=ROWS, max_position_embeddings=8, **IDS)
    ),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**SIZES, image_size=8, patch_size=4)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(**SIZES, vocab_size=ROWS, max_position_embeddings=8)
    ),
    "llama": MODELS["llama"],
}


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=1)
def test_transformers_families_are_the_same_when_fsdp_replaced_their_classes(family):
    want = hashes(materialize(on_meta(FAMILIES[family]), "cpu", seed=0))
    model = on_meta(FAMILIES[family])
    apply_fsdp2(model, fsdp_mesh(build_mesh(device_type="cpu")))
    wrapped = [type(m) for m in model.modules()]
    assert hashes(materialize(model, "cpu", seed=0)) == want
    assert [type(m) for m in model.modules()] == wrapped
    inside = nn.Sequential(on_meta(FAMILIES[family]))
    fully_shard(inside[0], mesh=fsdp_mesh(build_mesh(device_type="cpu")))
    materialize(inside, "cpu", seed=0, init=lambda m: m[0].initialize_weights())
    got = dict(inside[0].named_parameters())
    alone = nn.Sequential(on_meta(FAMILIES[family]))
    materialize(alone, "cpu", seed=0)
    for name, p in alone[0].named_parameters():
        assert torch.equal(whole(got[name]), p), name


@pytest.mark.parametrize("name", ["t5", "clip text"])
def test_transformers_families_are_the_same_when_checkpointed(name):
    want = hashes(materialize(on_meta(FAMILIES[name]), "cpu", seed=0))
    model = on_meta(FAMILIES[name])
    for owner in list(model.modules()):
        for key, child in owner.named_children():
            if type(child).__name__ in ("T5Block", "T5LayerNorm", "CLIPEncoderLayer", "Linear"):
                setattr(owner, key, checkpoint_wrapper(child))
    model = checkpoint_wrapper(model)
    materialize(model, "cpu", seed=0)
    assert {clean_name(n): value for n, value in hashes(model).items()} == want


def by_exact_class(model):
    for module in model.modules():
        if type(module) is nn.Linear:
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)
        elif type(module).__name__ == "LayerNorm":
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


@distributed(world_size=2)
def test_initialisations_see_the_classes_that_the_author_wrote():
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 2))

    want = hashes(materialize(on_meta(make), "cpu", seed=0, init=by_exact_class))
    mesh = build_mesh(dp_shard=1, tp=2, device_type="cpu")
    model = on_meta(make)
    plan = {"0": HeadParallel(1, replicate=True), "1": Replicated(), "3": Replicated()}
    for name, style in plan.items():
        style._apply(model.get_submodule(name), mesh["tp"])
    for part in (*model, model):
        fully_shard(part, mesh=fsdp_mesh(mesh))
    wrapped = [type(m) for m in model.modules()]
    assert not {nn.Linear, nn.LayerNorm} & set(wrapped)
    with pytest.raises(ZeroDivisionError):
        materialize(model, "cpu", seed=0, init=lambda m: 1 / 0)
    assert [type(m) for m in model.modules()] == wrapped
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu", seed=0, init=by_exact_class)
    assert hashes(model) == want
    assert [type(m) for m in model.modules()] == wrapped


def test_classes_that_users_wrote_are_left_alone():
    class Model(nn.Linear):
        __qualname__ = "Model"

    class Grown(Model):  # as a notebook's `class Model(Model)`
        __qualname__ = "Model"

        def init_weights(self):
            pass

    class Methods(FSDPModule, nn.Linear):
        pass

    wrapper = checkpoint_wrapper(nn.Linear(2, 2))
    for module in (Grown(2, 2), wrapper):
        kind = type(module)
        with original_classes(module):
            assert type(module) is kind
    assert _original(Methods) is Methods


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    model = on_meta(lambda: nn.Sequential(nn.Embedding(5, 4), kind(4, 3, 2, bidirectional=True)))
    before = list(model.parameters())
    with pytest.raises(ZeroDivisionError):
        materialize(model, "cpu", seed=0, init=lambda m: 1 / 0)
    assert all(p.is_meta for p in before)
    materialize(model, "cpu", seed=0)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    rnn = model[1]
    assert all(0 < p.abs().max() <= 3**-0.5 for p in rnn.parameters())
    x = model[0](torch.tensor([[0, 3, 1]]))
    plain = kind(4, 3, 2, bidirectional=True)
    plain.load_state_dict(rnn.state_dict())
    torch.testing.assert_close(rnn(x)[0], plain(x)[0])
    with torch.no_grad():  # what the forward uses are the parameters
        rnn.weight_hh_l0.zero_()
        rnn.bias_hh_l0 = nn.Parameter(torch.ones_like(rnn.bias_hh_l0))
    plain.load_state_dict(rnn.state_dict())
    torch.testing.assert_close(rnn(x)[0], plain(x)[0])
    assert rnn(x)[0].sum().backward() is None
    assert rnn.weight_ih_l0.grad is not None


@distributed(world_size=2)
def test_recurrent_layers_under_fsdp():
    def make():
        return nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 3, 2), Stranger())

    model = on_meta(make)
    fully_shard(model, mesh=fsdp_mesh(build_mesh(dp_shard=2, device_type="cpu")))
    want = on_meta(make)
    for m in (model, want):
        with pytest.raises(ValueError, match="freqs"):
            materialize(m, "cpu", seed=0)
        m[2] = nn.Identity()
        materialize(m, "cpu", seed=0)
    assert hashes(model) == hashes(want)


def all_on_meta(model):
    tensors = [*model.parameters(), *model.buffers()]
    return all(t.is_meta for t in tensors)


HOLDS = {
    "weak": (lambda w: weakref.ref(w), "weak references to it"),
    "view": (lambda w: w[0], "views or graphs of it"),
    "quiet view": (lambda w: w.detach(), None),
    "graph": (lambda w: (w * 2).sum(), None),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_what_holds_a_parameter_is_refused_before_anything_changes(hold):
    make, words = HOLDS[hold]
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.Linear(2, 3)))
    held = make(model[2].weight)
    with pytest.raises(ValueError, match=rf"2\.weight: .*{words}") if words else nullcontext():
        materialize(model, "cpu", seed=0)
    assert all_on_meta(model) == bool(words)
    del held
    materialize(model, "cpu", seed=0)
    assert not all_on_meta(model)


def test_what_holds_a_buffer_or_a_real_tensor_does_not_matter():
    def make():
        model = nn.Sequential(nn.Linear(2, 2), Rotary())
        model[1].register_buffer("start", model[1].inv_freq[:2])
        return model

    model = on_meta(make)
    model.append(nn.Linear(2, 2))
    held = weakref.ref(model[2].weight), weakref.ref(model[1].start), model[2].weight[0]

    def init(model):
        model[0].reset_parameters()
        model[1].inv_freq.copy_(model[1].compute())
        model[1].limit.fill_(1)
        model[1].start.copy_(model[1].inv_freq[:2])

    materialize(model, "cpu", seed=0, init=init)
    assert torch.equal(model[1].start, Rotary().inv_freq[:2])
    assert held[0]() is model[2].weight


@distributed(world_size=1)
def test_what_holds_a_sharded_parameter_is_refused_before_anything_changes():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    fully_shard(model, mesh=fsdp_mesh(build_mesh(device_type="cpu")))
    held = weakref.ref(model[1].weight)
    with pytest.raises(ValueError, match=r"1\.weight: .*weak references"):
        materialize(model, "cpu", seed=0)
    assert all_on_meta(model)
    assert held() is model[1].weight


@pytest.mark.parametrize("fails", ["parameter", "buffer"])
def test_an_error_while_tensors_are_made_leaves_the_model_on_meta(fails, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("full")

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Rotary(), nn.Linear(2, 2)))
    model[1].limit = torch.tensor(64)
    before = [*model.parameters(), *model.buffers()]
    if fails == "parameter":
        draw, calls = _init_draw.draw, []

        def third(*args, **kwargs):
            calls.append(1)
            return (draw if len(calls) < 3 else out_of_memory)(*args, **kwargs)

        monkeypatch.setattr(_init_draw, "draw", third)
    else:
        monkeypatch.setattr(_init_place, "_placed", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        materialize(model, "cpu", seed=0)
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert all(t.is_meta for t in after if t is not model[1].limit)


def test_hooks_on_parameters_are_kept():
    model, seen = nn.Linear(2, 2, device="meta"), []
    model.weight.register_hook(lambda grad: seen.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    removed = model.bias.register_hook(lambda grad: seen.append("removed"))
    materialize(model, "cpu", seed=0)
    removed.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["gradient", "accumulated"]


class Orthogonal(nn.Linear):
    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (nn.utils.weight_norm, "0.weight: not a parameter, WeightNorm of torch.nn.utils computes"),
        (nn.utils.spectral_norm, "0.weight: not a parameter, SpectralNorm of torch.nn.utils"),
        (lambda m: prune.random_unstructured(m, "bias", 0.5), "0.bias: not a parameter, Random"),
        (nn.utils.parametrizations.weight_norm, "needs the values of a whole parameter"),
        (lambda m: Orthogonal(2, 2, device=m.weight.device), "'0.weight': .* needs the values"),
    ],
)
def test_the_advice_to_build_a_part_on_a_real_device_works(wrap, words):
    # Made real and back, as some of them compute at once.
    model = nn.Sequential(wrap(nn.Linear(2, 2)), nn.Linear(2, 2)).to("meta")
    for init in (None, act_on_parameters):
        if init is None or words.startswith("0."):
            with pytest.raises(
                ValueError, match=f"(?s){words}.* real device: real tensors keep"
            ) as e:
                materialize(model, "cpu", seed=0, init=init)
            assert "register it as a buffer" not in str(e.value)
            assert all_on_meta(model)
    layer = wrap(nn.Linear(2, 2))
    want, x = layer(torch.ones(1, 2)), torch.ones(1, 2)
    model = nn.Sequential(layer.eval(), nn.Linear(2, 2, device="meta"))
    materialize(model, "cpu", seed=0)
    if wrap is not nn.utils.spectral_norm:  # it iterates in training
        assert torch.equal(model[0](x), want)
    assert model(x).isfinite().all()


def act_on_parameters(model):
    for p in model.parameters():
        p.normal_()


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_any_integer_is_a_seed(seed):
    a, b = (materialize(nn.Linear(4, 4, device="meta"), "cpu", seed=s) for s in (3, seed))
    assert hashes(a) == hashes(b)


def moments(t):
    t = t.double()
    return torch.stack([t.mean(), t.std(), t.pow(3).mean(), t.abs().mean()])


@pytest.mark.parametrize(
    "init",
    [
        lambda w: nn.init.normal_(w, 0.5, 2.0),
        lambda w: nn.init.uniform_(w, -1.0, 3.0),
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        lambda w: nn.init.xavier_normal_(w),
        lambda w: nn.init.trunc_normal_(w),
        lambda w: nn.init.trunc_normal_(w, 1.0, 2.0, -2.0, 2.0),
        lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 2.0, 2.5),  # far out, on one side
        lambda w: w.exponential_(2.0),
        lambda w: w.log_normal_(0.0, 0.25),
        lambda w: w.bernoulli_(0.3),
        lambda w: w.geometric_(0.8),
        lambda w: w.uniform_(-0.9, 0.9).erfinv_().mul_(2).clamp_(-1, 2),
    ],
)
def test_distributions_are_torchs(init):
    torch.manual_seed(0)
    want = init(torch.empty(600, 1000))
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(600, 1000, device="meta"))
    got = materialize(model, "cpu", seed=0, init=lambda m: init(m.w)).w.detach()
    scale = moments(want).abs().max()
    torch.testing.assert_close(moments(got) / scale, moments(want) / scale, rtol=0, atol=1e-2)
    assert want.min() - 0.05 * want.std() <= got.min() or want.min() < -3  # same bounds
    assert abs(got.mean(1).std() - want.mean(1).std()) < 0.1 * want.mean(1).std()  # rows differ
    assert not torch.equal(got[:262], got[262:524])  # and blocks


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (0.5, 2.5), (-1e-3, 1e-3)])
def test_trunc_normal_stays_inside_without_outliers(bounds):
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2**20, device="meta"))
    init = lambda m: nn.init.trunc_normal_(m.w, 0.0, 0.02 if bounds[0] == -2 else 1.0, *bounds)  # noqa: E731
    w = materialize(model, "cpu", seed=0, init=init).w
    assert bounds[0] <= w.min() < w.max() <= bounds[1]
    if bounds[0] == -2:  # 100 standard deviations away: nothing may land there
        assert w.abs().max() < 0.02 * 6


def test_trunc_normal_survives_the_ends_of_the_uniform_draw(monkeypatch):
    # About once in 2**24 draws uniform_ returns its lower limit.
    ends = torch.tensor([-1.0, -1.0, 1.0 - 2**-24, 0.0])
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, a, b, generator: self.copy_(ends))
    block = torch.empty(4)
    _init_draw.trunc_normal(block, torch.Generator(), mean=0.0, std=0.02, a=-2.0, b=2.0)
    assert block.abs().max() < 0.02 * 6


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(6, 4))


def act(body):
    return lambda model: body(model.w)


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (act(lambda w: w.copy_(torch.randn(6, 4))), r"aten.randn.*test_materialize.py.*w.copy_"),
        (act(lambda w: w.fill_(torch.rand(()).item())), "aten.rand"),
        (act(nn.init.orthogonal_), r"'w': aten.new_empty.* needs the values of a whole"),
        (act(lambda w: nn.init.sparse_(w, 0.5)), "aten.randperm"),
        (act(lambda w: w.mul_(w.norm())), "'w': aten.linalg_vector_norm"),
        (act(lambda w: w.div_(w.max().item())), "'w': aten.max"),
        (act(lambda w: w.mul_(torch.ones(6, 4))), "'w': aten.mul_"),
        (act(lambda w: w.normal_()[::2].normal_()), "'w'.* isn't a box"),
        (act(lambda w: w.view(-1).normal_()), "'w'.* isn't a box"),
        (act(lambda w: w.normal_(generator=torch.Generator())), "'w'.* brings a generator"),
        (act(lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 30.0, 31.0)), "no probability"),
        (act(lambda w: w.normal_().view(torch.int32).fill_(1)), "'w': aten.view.dtype"),
        (act(lambda w: w[1:].normal_()), "w: nothing fills all of this parameter"),
        (act(lambda w: w.mul_(2)), "w: nothing fills all of this parameter"),
        (act(lambda w: w[:, 3].normal_() + w[:, :3]), "'w': aten.add"),
        (lambda m: None, "w: nothing fills all of this parameter"),
        (
            lambda m: setattr(m, "w", nn.Parameter(torch.ones(6, 4))),
            "w: initialisation replaces it",
        ),
        (
            lambda m: m.register_parameter("v", nn.Parameter(torch.ones(1))),
            "v: initialisation adds",
        ),
        (lambda m: m.register_buffer("v", m.w.clone()), "'w': aten.clone"),
        (lambda m: setattr(m.w, "data", torch.ones(6, 4)), None),
    ],
)
def test_what_cannot_be_the_same_on_every_mesh_is_refused(init, words):
    model = on_meta(One)
    weight, state = model.w, torch.get_rng_state()
    patched = nn.init._no_grad_trunc_normal_
    with pytest.raises((ValueError, RuntimeError), match=words):
        materialize(model, "cpu", seed=0, init=init)
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.init._no_grad_trunc_normal_ is patched
    assert model.w is weight
    assert weight.is_meta
    assert list(model._parameters) == ["w"]
    assert not model._buffers
    materialize(model, "cpu", seed=0, init=act(nn.init.ones_))
    assert (model.w == 1).all()


def test_all_that_is_not_initialised_is_listed():
    model = on_meta(lambda: nn.Sequential(One(), nn.Linear(2, 2), One(), Stranger()))
    model[1].table = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match=r"(?s)1\.table.*0\.w.*2\.w.*3\.freqs"):
        materialize(model, "cpu", seed=0)


def test_torchs_random_state_and_modes_are_left_alone():
    def init(model):
        torch.manual_seed(0)
        model.w.normal_()

    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.device("meta"):  # forgotten by the caller
        model = materialize(One(), "cpu", seed=0, init=init)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.w.device.type == "cpu"
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_reference_kept_by_the_initialisation_says_so():
    kept = []
    model = materialize(on_meta(One), "cpu", seed=0, init=act(lambda w: kept.append(w.normal_())))
    with pytest.raises(ValueError, match="keep a reference to the module"):
        kept[0].data.zero_()
    assert model.w.std() > 0
    with pytest.raises(ValueError, match="w2: a plain attribute"):
        materialize(on_meta(One), "cpu", seed=0, init=lambda m: m.__dict__.update(w2=m.w.zero_()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(device="meta", seed=0), "device is meta"),
        (dict(device="cpu", seed=0.5), "seed must be an int"),
        (dict(device="cpu", seed=True), "seed must be an int"),
        (dict(device="cpu", seed="3"), "seed must be an int"),
        (dict(device="cpu", seed=np.float64(3)), "seed must be an int"),
        (dict(device="cpu", seed=np.bool_(True)), "seed must be an int"),
        (dict(device="cpu", seed=torch.tensor(True)), "seed must be an int"),
        (dict(device="cpu", seed=0, init="normal"), "init must be a function"),
    ],
)
def test_arguments_are_checked(arguments, words):
    with pytest.raises(ValueError, match=words):
        materialize(on_meta(One), **arguments)


def test_lazy_modules_are_refused():
    with pytest.raises(ValueError, match=r"0\.weight: has no shape yet"):
        materialize(nn.Sequential(nn.LazyLinear(3, device="meta")), "cpu", seed=0)


@distributed(world_size=2)
def test_parameters_that_fsdp_offloads_are_known():
    mesh = fsdp_mesh(build_mesh(dp_shard=2, device_type="cpu"))
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model[1], mesh=mesh)
    assert _offloaded(model) == {id(p) for p in model[0].parameters()}
    materialize(model, "cpu", seed=0)
    assert _offloaded(model) == {id(p) for p in model[0].parameters()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@distributed(world_size=1)
def test_on_an_accelerator_the_weights_are_those_of_the_cpu():
    for kind, make in MODELS.items():
        want = hashes(materialize(on_meta(make), "cpu", seed=7))
        kind_of_device = torch.accelerator.current_accelerator().type
        state = torch.get_device_module(kind_of_device).get_rng_state()
        model = materialize(on_meta(make), kind_of_device, seed=7)
        assert torch.equal(torch.get_device_module(kind_of_device).get_rng_state(), state)
        assert all(t.device.type != "cpu" for t in [*model.parameters(), *model.buffers()])
        assert hashes(model.cpu()) == want, kind


@distributed(world_size=4)
def test_placements_that_have_no_shard_are_refused():
    mesh = build_mesh(dp_shard=2, tp=2, device_type="cpu")["dp_shard", "tp"]
    shard, strided = Shard(0), _StridedShard(0, split_factor=2)
    for placements, words in (
        ((Partial(), shard), "not reduced"),
        ((shard, strided), "separate rows"),
        ((strided, Replicate()), "separate rows"),
        ((_StridedShard(0, split_factor=4), shard), "separate rows"),
        ((strided, shard), None),
        ((_StridedShard(1, split_factor=2), Shard(1)), None),
        ((shard, shard), None),
    ):
        model = on_meta(One)
        local = torch.empty(model.w.shape, device="meta")
        w = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=(6, 4), stride=(4, 1)
        )
        model.w = nn.Parameter(w)
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            materialize(model, "cpu", seed=0, init=act(nn.init.ones_))
