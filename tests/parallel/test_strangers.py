"""ptx on models it has never seen: every mesh computes what one process does, and errors tell the way."""

import functools
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import harness
import ptx
from harness import distributed
from parallel import strangers
from parallel.strangers import STRANGERS, WRONG, ConvNet, Gpt, Mlp, Twins, Vit
from ptx.parallel import HeadParallel, Replicated

BOUND = 1e-5  # fp32, max|difference| / max|reference| per tensor
STEPS, SEED, MAX_NORM = 2, 3, 0.1
MESHES = {
    "dp 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "dp 2 x tp 2": {"dp_shard": 2, "tp": 2},
}
PAGE = Path(__file__).parents[2] / "docs/your_own_model.md"
BY_NAME = {**STRANGERS, **WRONG}


@dataclass
class Outcome:
    """What STEPS steps gave, in full tensors."""

    initial: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the first step
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


# Exactness


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_one_process(mesh):
    names = [n for n, stranger in STRANGERS.items() if "tp" not in MESHES[mesh] or stranger.plan]
    check(mesh, names)


def test_a_cut_through_a_fused_matrix_is_noticed_here():
    with pytest.raises(AssertionError, match=r"gradients of .*: 0\.[1-9]"):
        check("tp 2", list(WRONG))


def check(mesh, names):
    __tracebackhide__ = True
    size = torch.Size(MESHES[mesh].values()).numel()
    answers = harness.run(train_on_mesh, size, MESHES[mesh], names)
    for name in names:
        want = train_plainly(name)
        for rank, answer in enumerate(answers):
            assert_same(answer[name], want, f"{name}, rank {rank}")


def train_on_mesh(degrees, names):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    return {name: train_one_on_mesh(mesh, BY_NAME[name]) for name in names}


def train_one_on_mesh(mesh, stranger):
    """What a user writes."""
    data = ptx.data_mesh(mesh)
    model = build(stranger, seed=dist.get_rank())
    if stranger.plan:
        ptx.apply_tp(model, mesh["tp"], stranger.plan(model))
    if data.size() > 1:
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), **stranger.fsdp)
    ptx.materialize(model, "cpu", seed=SEED, init=stranger.init)

    def mean_loss(*batch):
        loss = stranger.loss(model, *(t.chunk(data.size())[data.get_local_rank()] for t in batch))
        mean = loss.detach() / data.size()
        dist.all_reduce(mean, group=data.get_group())
        return loss, mean

    return train(model, stranger, mean_loss, ptx.clip_grad_norm_)


@functools.cache
def train_plainly(name):
    """The reference: the unwrapped model on the whole batch, no ptx but for the initial weights."""
    stranger = BY_NAME[name]
    model = ptx.materialize(build(stranger, seed=0), "cpu", seed=SEED, init=stranger.init)

    def mean_loss(*batch):
        loss = stranger.loss(model, *batch)
        return loss, loss.detach()

    return train(model, stranger, mean_loss, nn.utils.clip_grad_norm_)


def build(stranger, seed):
    torch.manual_seed(seed)
    with torch.device("meta" if stranger.meta else "cpu"):
        return stranger.model()


def train(model, stranger, mean_loss, clip):
    outcome = Outcome({name: full(p) for name, p in model.named_parameters()})
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        loss, mean = mean_loss(*stranger.batch(generator))
        loss.backward()
        outcome.losses.append(float(mean))
        if step == 0:
            outcome.gradients = {name: full(p.grad) for name, p in model.named_parameters()}
        outcome.norms.append(float(clip(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: full(p) for name, p in model.named_parameters()}
    return outcome


def full(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if tensor is None else tensor.detach().clone()


def assert_same(got, want, what):
    assert got.initial.keys() == want.initial.keys(), what
    for name, value in want.initial.items():
        assert torch.equal(got.initial[name], value), f"{what}: initial {name}"
        for kind in ("gradients", "weights"):
            given, expected = getattr(got, kind)[name], getattr(want, kind)[name]
            if expected is None:  # frozen, or never used
                assert given is None, f"{what}: {kind} of {name}"
                continue
            error = float((given - expected).abs().max() / expected.abs().max())
            assert error <= BOUND, f"{what}: {kind} of {name}: {error}"
    for kind in ("losses", "norms"):
        assert getattr(got, kind) == pytest.approx(getattr(want, kind), rel=BOUND), (
            f"{what}: {kind}"
        )


def test_the_models_have_what_they_are_here_for():
    """Frozen and unused parts, and none of the tensors compared is zero for another reason."""
    for name, stranger in STRANGERS.items():
        outcome = train_plainly(name)
        without = {n for n, grad in outcome.gradients.items() if grad is None}
        expected = {"stem", "unused", "unused_too", "encoder"} if "twins" in name else set()
        assert {n.split(".")[0] for n in without} == expected, name
        smallest = min(float(g.abs().max()) for g in outcome.gradients.values() if g is not None)
        assert smallest > 1e-5, name
        assert outcome.norms[0] > MAX_NORM, name
        assert stranger.meta or name in ("convnet", "random buffer")


def test_the_page_shows_the_styles_that_were_tested():
    page = PAGE.read_text()
    for recipe in (strangers.SplitFused, strangers.SplitFusedLinear):
        assert inspect.getsource(recipe) in page, recipe


@distributed(world_size=4)
def test_the_page_is_exact_over_tp():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    code = "\n".join(blocks).replace("build_mesh(", 'build_mesh(device_type="cpu", ')
    user = {"__name__": "user"}
    exec(code.replace("tp=1", "tp=2"), user)
    mesh, model = user["mesh"], user["model"]
    assert mesh["tp"].size() == mesh["dp_shard"].size() == 2
    reference = ptx.materialize(on_meta(user["Gpt"]), "cpu", seed=0, init=user["init"])
    batch = strangers.token_batch(torch.Generator().manual_seed(SEED))
    data = ptx.data_mesh(mesh)
    mine = (t.chunk(2)[data.get_local_rank()] for t in batch)
    strangers.token_loss(model, *mine).backward()
    strangers.token_loss(reference, *batch).backward()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = float((full(got.grad) - want.grad).abs().max() / want.grad.abs().max())
        assert error <= BOUND, f"{name}: {error}"


# What a stranger reads when something doesn't fit


@pytest.fixture
def tp():
    """A tp mesh of 2 in this process, for what has to fail before anything is communicated."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def dp(tp):
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))


def on_meta(kind, *args):
    with torch.device("meta"):
        return kind(*args)


def message_of(fn, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        fn(*args, **kwargs)
    return str(error.value)


def test_a_model_without_a_known_plan(tp):
    for call in (lambda: ptx.tp_plan(on_meta(Gpt)), lambda: ptx.apply_tp(on_meta(Gpt), tp)):
        assert message_of(call) == (
            "tp_plan: no plan for Gpt (h.*.attn.qkv is several matrices in one: cut by rows, a rank"
            " would have all of the first and none of the last), only for ptx.Transformer and"
            " transformers' Llama, Mistral, Qwen2, Qwen3, SmolLM3 (ForCausalLM and Model); give apply_tp"
            " a plan= of your own, module glob -> ParallelStyle"
        )


def test_a_plan_with_wrong_and_missing_keys(tp):
    model, plan = on_meta(Gpt), strangers.gpt_plan(None)
    plan["h.mlp.up"] = plan.pop("h.*.mlp.up")  # without the star
    plan["h.*.mlp.dwn"] = plan.pop("h.*.mlp.down")
    del plan["wpe"]
    assert message_of(ptx.apply_tp, model, tp, plan).splitlines() == [
        "apply_tp: the plan doesn't fit Gpt:",
        "- 'h.mlp.up' matches nothing; closest: 'h.*.mlp.up'",
        "- 'h.*.mlp.dwn' matches nothing; closest: 'h.*.mlp.down'",
        "- no key covers wpe.weight, h.*.mlp.up.weight, h.*.mlp.up.bias, h.*.mlp.down.weight,"
        " h.*.mlp.down.bias; add keys for their modules (Replicated() keeps one whole;"
        ' the key of the model itself is "")',
    ]
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_a_plan_with_styles_that_do_not_fit(tp):
    plan = strangers.gpt_plan_by_heads(None)
    plan["h.*.attn"] = ColwiseParallel()
    plan["h.*.attn.qkv"] = HeadParallel(3)
    plan["lm_head"] = Replicated()
    assert message_of(ptx.apply_tp, on_meta(Gpt, True), tp, plan).splitlines() == [
        "apply_tp: the plan doesn't fit Gpt:",
        "- h.*.attn: ColwiseParallel takes an nn.Linear or an nn.Embedding, not FusedAttention",
        "- h.*.attn.qkv: 3 heads don't split over tp=2; choose a tp that divides them, or keep attention"
        " whole (tp_plan(model, whole_attention=True))",
        "- one tied parameter would be sharded in several ways, wte.weight Shard(dim=0), lm_head.weight"
        " Replicate(); an embedding's RowwiseParallel and a head's ColwiseParallel agree, Shard(dim=0)",
    ]


def test_parameters_of_the_model_itself_need_a_key_too(tp):
    plan = strangers.vit_plan(None)
    del plan[""]
    message = message_of(ptx.apply_tp, on_meta(Vit), tp, plan)
    assert "- no key covers cls_token, pos_embed, patch_embed.weight" in message
    assert "blocks.*.gamma, " in message


def test_a_head_that_is_not_there(dp):
    message = message_of(ptx.apply_fsdp2, on_meta(Vit), dp, head="classifier")
    assert message.startswith("apply_fsdp2: head: 'classifier' matches nothing; closest: ")


def test_a_head_that_is_not_there_is_not_proposed(dp):
    message = message_of(ptx.apply_fsdp2, on_meta(Vit), dp, head="lm_head")
    assert message == "apply_fsdp2: head: 'lm_head' matches nothing; closest: 'head'"


def test_units_that_are_not_there(dp):
    assert message_of(ptx.apply_fsdp2, on_meta(Gpt), dp, units=["layers.*", "h"]) == (
        "apply_fsdp2: 'layers.*' matches nothing; closest: 'h.*'; 'h' is a ModuleList, never called"
        " itself; write 'h.*'"
    )


def test_which_blocks_are_found():
    names = ("gpt", "llama", "twins", "vit", "convnet")
    found = {name: ptx.find_blocks(build(STRANGERS[name], 0)) for name in names}
    assert found["gpt"] == ["h.0", "h.1"]
    assert found["llama"] == ["model.layers.0", "model.layers.1"]
    assert found["twins"] == ["encoder.stages.0", "encoder.stages.1"]  # not the blocks inside
    assert found["vit"] == ["blocks.0", "blocks.1"]
    assert found["convnet"] == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_blocks_that_are_not_found_or_not_clear():
    model = on_meta(Gpt)
    model.experts = nn.ModuleList([Mlp(), Mlp()])
    assert message_of(ptx.find_blocks, model) == (
        "find_blocks: it isn't clear which modules of Gpt are its blocks: 'h.*' (2 GptBlock),"
        " 'experts.*' (2 Mlp); name them: units=['h.*', 'experts.*']"
    )
    assert message_of(ptx.find_blocks, Mlp()) == (
        "find_blocks: Mlp has no list of repeated blocks (an nn.ModuleList, ModuleDict or Sequential"
        " of modules of one class); name them: units=['encoder.*'], or units=[] for none"
    )


def test_a_model_whose_own_parameters_nothing_initialises():
    message = message_of(ptx.materialize, on_meta(Twins), "cpu", seed=0)
    for line in (
        "materialize: Twins can't be initialised:",
        "- mark: nothing fills all of this parameter",
        "- mean: nothing writes all of this buffer",
        "- waves: nothing writes all of this buffer",
        "- encoder.stages.0.blocks.0.gain: nothing fills all of this parameter",
        "- scales.0: nothing fills all of this parameter",
        "Let reset_parameters() of the module, init_weights() of the model or init= write it.",
    ):
        assert line in message.splitlines()


def test_a_parameter_without_a_dim(dp):
    model = Vit()
    model.logit_scale = nn.Parameter(torch.tensor(2.6))
    assert message_of(ptx.apply_fsdp2, model, dp) == (
        "apply_fsdp2: ['logit_scale'] have no dim to shard; give them shape [1]"
    )


def test_a_parametrised_matrix_is_refused_or_split(tp):
    model = nn.Sequential(nn.Linear(4, 4), Mlp())
    nn.utils.parametrizations.weight_norm(model[1].up)
    plan = {"0": Replicated(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    assert "*.up" in message_of(ptx.apply_tp, model, tp, plan)


def test_steps_in_the_wrong_order(tp, dp):
    model = on_meta(ConvNet)
    ptx.apply_fsdp2(model, dp)
    assert message_of(ptx.apply_tp, model, tp, {}) == (
        "apply_tp: the model already went through apply_fsdp2; call apply_tp before it (order: apply_tp"
        " -> apply_ac / apply_compile -> apply_fsdp2 -> materialize -> optimizer)"
    )
