import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from ptx.flops import Flops, estimate_flops_fake, transformer_flops
from ptx.loss import chunked_ce, token_logprobs

PRODUCT = 2 * 10 * 32 * 64
ARGS = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=16)
TOKENS = torch.zeros(2, 8, dtype=torch.long)


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def numbers(count: Flops) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recompute


class Checkpointed(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.options)


class OldStyle(torch.autograd.Function):
    """Recomputation as libraries write it themselves."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, g)
        return None, x.grad


def test_P05_recomputation_is_not_model_flops():
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = grad(10, 32)
    model_flops = 2 * PRODUCT, 4 * PRODUCT
    assert numbers(estimate_flops_fake(plain, x)) == (*model_flops, 0)
    assert estimate_flops_fake(plain, x).total == 245_760
    # torch stops before the last product, whose result no gradient needs.
    count = estimate_flops_fake(Checkpointed(use_reentrant=False), x)
    assert numbers(count) == (*model_flops, PRODUCT)
    assert (count.total, count.hardware_total) == (245_760, 286_720)
    assert numbers(estimate_flops_fake(checkpoint_wrapper(plain), x)) == (*model_flops, PRODUCT)
    with set_checkpoint_early_stop(False):
        count = estimate_flops_fake(Checkpointed(use_reentrant=False), x)
    assert numbers(count) == (*model_flops, 2 * PRODUCT)
    count = estimate_flops_fake(Checkpointed(use_reentrant=True), x)
    assert numbers(count) == (*model_flops, 2 * PRODUCT)
    count = estimate_flops_fake(lambda x: OldStyle.apply(plain, x), x)
    assert numbers(count) == (*model_flops, 2 * PRODUCT)
    ptx.apply_ac(model := nn.Sequential(plain), "full", units=["0"])
    assert numbers(estimate_flops_fake(model, x)) == (*model_flops, PRODUCT)


def test_recomputation_is_in_the_module_that_repeats():
    count = estimate_flops_fake(nn.Sequential(Checkpointed(use_reentrant=False)), grad(10, 32))
    assert {name: numbers(part) for name, part in count.by_module.items() if name} == {
        "0": (2 * PRODUCT, 4 * PRODUCT, PRODUCT),
        "0.inner": (2 * PRODUCT, 4 * PRODUCT, PRODUCT),
        "0.inner.0": (PRODUCT, 2 * PRODUCT, PRODUCT),
        "0.inner.2": (PRODUCT, 2 * PRODUCT, 0),
    }


def test_nested_checkpoints_and_a_gradient_in_the_forward():
    inner = Checkpointed(use_reentrant=False)
    count = estimate_flops_fake(lambda x: checkpoint(inner, x, use_reentrant=False), grad(10, 32))
    assert numbers(count)[:2] == (2 * PRODUCT, 4 * PRODUCT)
    assert count.recompute >= PRODUCT

    linear = nn.Linear(32, 64)

    def with_forces(x):
        energy = linear(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    # The energy, and its gradient, the force; then the gradients of the force's two factors, one of
    # which goes on through the first product.
    count = estimate_flops_fake(with_forces, grad(10, 32))
    assert numbers(count) == (PRODUCT, 5 * PRODUCT, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_that_is_a_whole_step(reentrant):
    model = Checkpointed(use_reentrant=reentrant)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    count = estimate_flops_fake(step, grad(10, 32))
    assert numbers(count) == numbers(estimate_flops_fake(model, grad(10, 32)))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_apply_ac_and_apply_compile(ac, compiled):
    model = ptx.Transformer(ARGS)
    if compiled:
        ptx.apply_compile(model, backend="eager")
    if ac != "none":
        ptx.apply_ac(model, ac)
    assert estimate_flops_fake(model, TOKENS) == transformer_flops(ARGS, 2, 8, ac=ac)


def test_policies_find_the_kernels_of_a_gpu():
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten

    def policy(ctx, op, *args, **kwargs):
        kept = {
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
        }
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    full = transformer_flops(ARGS, 2, 8, ac="full")
    model = ptx.apply_ac(ptx.Transformer(ARGS), policy)
    for documents in (None, TOKENS):  # flash, and with a mask
        count = estimate_flops_fake(model, TOKENS, documents=documents)
        assert count.total == full.total
        assert count.by_op["attention"].recompute == 0
        assert count.recompute == full.recompute - full.by_op["attention"].recompute


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_gradient_checkpointing(reentrant):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    plain = estimate_flops_fake(model, TOKENS)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.model.embed_tokens.weight.requires_grad_()  # reentrant needs an input with a gradient
    count = estimate_flops_fake(model, TOKENS)
    assert numbers(count)[:2] == numbers(plain)[:2]
    down = 2 * 16 * 48 * 32 * 2
    blocks = plain.by_module["model.layers"].forward
    assert count.recompute == blocks - (0 if reentrant else down)


# Fused losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused_linear_ce_counts_as_the_eager_loss(reduction, chunk, dtype):
    hidden, head = (torch.randn(n, 32).to(dtype).requires_grad_() for n in (10, 64))
    labels = torch.zeros(10, dtype=torch.long)

    def fused(hidden, head, labels):
        return ptx.fused_linear_ce(hidden, head, labels, reduction=reduction, chunk_tokens=chunk)

    again = PRODUCT if reduction == "none" else 0
    assert numbers(estimate_flops_fake(fused, hidden, head, labels)) == (
        PRODUCT,
        2 * PRODUCT,
        again,
    )
    count = estimate_flops_fake(fused, hidden, head, labels, backward=False)
    assert numbers(count) == (PRODUCT, 0, 0)
    for frozen in ((hidden.detach(), head), (hidden, head.detach())):
        count = estimate_flops_fake(fused, *frozen, labels)
        assert numbers(count) == (PRODUCT, PRODUCT, again)
    count = estimate_flops_fake(
        lambda *x: checkpoint(fused, *x, use_reentrant=False), hidden, head, labels
    )
    # Gradients that are there need no repetition; if they aren't, the forward is repeated too.
    assert numbers(count) == (PRODUCT, 2 * PRODUCT, 2 * again)


def test_a_model_with_a_fused_loss():
    model = ptx.Transformer(ARGS)
    want = numbers(transformer_flops(ARGS, 2, 8))

    def eager(tokens, labels):
        return ptx.cross_entropy(model(tokens), labels)

    def fused(tokens, labels):
        return ptx.fused_linear_ce(model(tokens, return_hidden=True), model.output, labels)

    assert numbers(estimate_flops_fake(eager, TOKENS, TOKENS)) == want
    assert numbers(estimate_flops_fake(fused, TOKENS, TOKENS)) == want
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_log_probabilities_repeat_one_product(chunk, entropy):
    def fn(hidden, head, labels):
        return token_logprobs(hidden, head, labels, chunk_tokens=chunk, entropy=entropy)

    inputs = grad(10, 32), grad(64, 32), torch.zeros(10, dtype=torch.long)
    assert numbers(estimate_flops_fake(fn, *inputs)) == (PRODUCT, 2 * PRODUCT, PRODUCT)
    assert numbers(estimate_flops_fake(fn, *inputs, backward=False)) == (PRODUCT, 0, 0)


def test_losses_of_logits_add_nothing():
    hidden, head, labels = grad(10, 32), grad(64, 32), torch.zeros(10, dtype=torch.long)
    for loss in (ptx.cross_entropy, chunked_ce):
        count = estimate_flops_fake(lambda h, w, y, f=loss: f(h @ w.t(), y), hidden, head, labels)
        assert numbers(count) == (PRODUCT, 2 * PRODUCT, 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torchs_own_fused_loss(reduction):
    hidden, head, labels = grad(10, 32), grad(64, 32), torch.zeros(10, dtype=torch.long)
    for options in (None, nn.LinearCrossEntropyOptions()):
        count = estimate_flops_fake(
            F.linear_cross_entropy, hidden, head, labels, reduction=reduction, options=options
        )
        again = PRODUCT if options and reduction == "none" else 0
        assert numbers(count) == (PRODUCT, 2 * PRODUCT, again)
