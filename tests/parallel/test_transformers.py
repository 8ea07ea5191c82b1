"""transformers models on a mesh compute what one process does, through every kind of loss."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor

import harness
import ptx
from harness import distributed

BOUND = 1e-5  # fp32, max|difference| / max|reference| per tensor
BATCH, SEQ, VOCAB = 4, 16, 61  # 61 rows split unevenly
MESHES = {
    "dp 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "dp 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "tp 4": {"tp": 4},  # 2 kv heads are replicated
}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TIED = {"tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", TIED),
    "mistral, window": ("Mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied, windows": ("Qwen2", {**TIED, **WINDOW}),
    "qwen3, tied": ("Qwen3", {**TIED, "head_dim": 12}),
    "qwen3, windows, biases": ("Qwen3", {**WINDOW, "head_dim": 12, "attention_bias": True}),
    "smollm3": ("SmolLM3", {**TIED, "no_rope_layers": [1, 0]}),
}
LOSSES = ("logits", "fused", "fused, no SP")
# 3 heads, which neither 2 nor 4 ranks can share.
WHOLE = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 36}
MODELS |= {
    "llama, whole attention": ("Llama", {**WHOLE, **TIED, "attention_bias": True}),
    "qwen3, whole attention": ("Qwen3", {**WHOLE, "head_dim": 10}),
    "llama, whole attention, eager": (
        "Llama",
        {"num_attention_heads": 6, "hidden_size": 36, "attn_implementation": "eager"},
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_equal_one_process(mesh):
    size = torch.Size(MESHES[mesh].values()).numel()
    for rank, answers in enumerate(harness.run(train_on_mesh, size, MESHES[mesh])):
        for (name, loss), (got_loss, got) in answers.items():
            want_loss, want = train_plainly(name)
            what = f"{name}, {loss}, rank {rank}"
            assert abs(got_loss - want_loss) <= BOUND * want_loss, what
            assert got.keys() == want.keys()
            for key, value in want.items():
                error = float((got[key] - value).abs().max() / value.abs().max())
                assert error <= BOUND, f"{what}, {key}: {error}"


def train_on_mesh(degrees):
    mesh = ptx.build_mesh(**degrees, device_type="cpu")
    data = ptx.data_mesh(mesh)
    tokens, labels = (t.chunk(data.size())[data.get_local_rank()] for t in batch())
    scale = ptx.token_scale(labels, ptx.loss_mesh(mesh))
    answers = {}
    for name in MODELS:
        for how in LOSSES if mesh["tp"].size() > 1 else LOSSES[:2]:
            model = build(name)
            plan = ptx.tp_plan(
                model, sequence_parallel="no SP" not in how, whole_attention="whole" in name
            )
            ptx.apply_tp(model, mesh["tp"], plan)
            ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
            if how == "logits":
                loss = ptx.cross_entropy(model(tokens).logits, labels, reduction="sum")
            else:
                hidden = model.model(tokens).last_hidden_state
                loss = ptx.fused_linear_ce(hidden, model.lm_head, labels, reduction="sum")
            (loss * scale).backward()
            mean = (loss * scale).detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG, ptx.loss_mesh(mesh).get_group())
            gradients = {key: full(p.grad) for key, p in model.named_parameters()}
            answers[name, how] = float(mean), gradients
    return answers


@functools.cache
def train_plainly(name):
    model = build(name)
    tokens, labels = batch()
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters()}


def batch():
    tokens, labels = torch.randint(
        VOCAB, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(1)
    )
    labels[0, 9:] = labels[2, :3] = -100
    labels[3] = -100  # unequal counts on the data ranks
    return tokens, labels


def build(name):
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        centre = float("norm" in key)
        torch.nn.init.normal_(parameter, centre, 0.3 if parameter.ndim == 2 else 0.1)
    return model


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@distributed(world_size=2)
def test_qk_norm_gradients_are_sums_over_the_ranks():
    """Left out of the plan they would be one rank's heads' share, 90 % off, at an exact loss."""
    mesh = ptx.build_mesh(tp=2, device_type="cpu")
    tokens, labels = batch()
    model = build("qwen3, tied")
    plan = ptx.tp_plan(model)
    for norm in ("q_norm", "k_norm"):
        plan[f"model.layers.*.self_attn.{norm}"] = ptx.parallel.Replicated()
    ptx.apply_tp(model, mesh["tp"], plan)
    loss = ptx.cross_entropy(model(tokens).logits, labels)
    loss.backward()
    want_loss, want = train_plainly("qwen3, tied")
    assert abs(loss.item() - want_loss) <= BOUND * want_loss
    key = "model.layers.0.self_attn.q_norm.weight"
    got = full(dict(model.named_parameters())[key].grad)
    off = (got - want[key]).abs().max() / want[key].abs().max()
    assert off > 0.1


def test_the_models_have_what_they_are_here_for():
    for name in MODELS:
        _, gradients = train_plainly(name)
        # (The bias of k without RoPE would be: it adds the same to all scores of a query.)
        small = {k for k, g in gradients.items() if float(g.abs().max()) < 1e-4}
        assert not small, (name, small)
