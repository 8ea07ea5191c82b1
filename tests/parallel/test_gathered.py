"""What FSDP leaves gathered is never used out of date, nor given to an optimizer after an evaluation."""

import copy
import functools

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from collectives import CollectiveLog
from harness import distributed
from parallel.test_fsdp2 import (
    HEAD_AND_NORM,
    batch,
    close,
    full,
    llama,
    logits,
    logits_by_head,
    loss_of,
    own,
)
from ptx.mesh import build_mesh, fsdp_mesh
from ptx.parallel._accumulate import accumulate_grads
from ptx.parallel._fsdp2 import apply_fsdp2

TIED = functools.partial(own, tie=True)
TIED_LLAMA = functools.partial(llama, tie=True)
LLAMA_HEAD_AND_NORM = {"units": ["model.layers.*", ["model.norm", "lm_head"]]}
FALSE, TWO = {"reshard_after_forward": False}, {"reshard_after_forward": 2}
CASES = {
    "True": (own, logits_by_head, {}),
    "True, tied": (TIED, logits_by_head, {}),
    "True, head in the forward": (own, logits, {}),
    "True, Llama": (llama, logits_by_head, {}),
    "True, Llama, head in the forward": (llama, logits, {}),
    "True, tied Llama": (TIED_LLAMA, logits_by_head, {}),
    "head with norm": (own, logits_by_head, HEAD_AND_NORM),
    "tied head with norm": (TIED, logits_by_head, HEAD_AND_NORM),
    "Llama, head with norm": (llama, logits_by_head, LLAMA_HEAD_AND_NORM),
    "over 2 neighbours": (own, logits_by_head, TWO),
    "over 2 neighbours, tied Llama": (TIED_LLAMA, logits, TWO),
    "False": (own, logits_by_head, FALSE),
    "False, tied": (TIED, logits_by_head, FALSE),
    "False, Llama": (llama, logits, FALSE),
}


def pairs():
    """A model on one process and the same one sharded, and how to call it."""
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    for name, (build, call, options) in CASES.items():
        torch.manual_seed(0)
        reference = build()
        torch.manual_seed(0)
        yield name, reference, apply_fsdp2(build(), mesh, **options), call


def gathered(model):
    """Parameters that are copies: whole ones, or shards over fewer ranks."""
    return [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) or p.device_mesh.ndim != 1
    ]


@distributed(world_size=4)
def test_an_optimizer_built_after_an_evaluation_trains_all():
    tokens = batch(1)
    for name, reference, model, call in pairs():
        for _ in range(2):
            with torch.no_grad():
                call(model, tokens)
            assert gathered(model) == [], name
        start = {n: full(p).detach().clone() for n, p in model.named_parameters()}
        for each in (model, reference):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            loss_of(call, each, tokens).backward()
            optimizer.step()
        for n, p in reference.named_parameters():
            got = full(model.get_parameter(n))
            assert not torch.equal(got, start[n]), (name, n)
            assert close(got.detach(), p.detach()), (name, n)


@distributed(world_size=4)
def test_parts_evaluated_by_themselves_are_freed():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)
    for options in ({}, HEAD_AND_NORM):
        model = apply_fsdp2(own(tie=True), mesh, **options)
        loss_of(logits, model, tokens).backward()
        for part, data in ((model.tok_embeddings, tokens), (model.output, torch.randn(2, 16))):
            with torch.no_grad():
                part(data)
            assert gathered(model) == []
        with torch.no_grad(), CollectiveLog() as log:
            logits(model, tokens)  # the embedding's call doesn't free what the head needs
        assert log.count("allgather") == (4 if not options else 3)


STEPS = {
    "loop": functools.partial(torch.optim.AdamW, foreach=False),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("grad", [True, False], ids=["metric", "evaluation"])
@distributed(world_size=4)
def test_a_forward_between_backward_and_step(grad):
    tokens = batch(1)
    for i, (name, reference, model, call) in enumerate(pairs()):
        optimizer = list(STEPS.values())[i % len(STEPS)]
        optimizers = [optimizer(each.parameters(), lr=0.1) for each in (model, reference)]
        for _ in range(2):
            for each, optimizer in zip((model, reference), optimizers):
                loss_of(call, each, tokens).backward()
                with torch.set_grad_enabled(grad):
                    call(each, tokens.flip(1))
                if not grad:  # what clip_grad_norm_ is given
                    assert all(p.grad is not None for p in each.parameters()), name
                optimizer.step()
                optimizer.zero_grad()
        got, want = call(model, tokens).detach(), call(reference, tokens).detach()
        assert close(got, want, 1e-4), name


@distributed(world_size=4)
def test_two_forwards_before_a_backward():
    """With an evaluation between, and gradients of an earlier step still there."""
    tokens = batch(1)
    for name, reference, model, call in pairs():
        for each in (model, reference):
            loss_of(call, each, tokens).backward()
            losses = [loss_of(call, each, tokens)]
            with torch.no_grad():
                logits(each, tokens)
            # torch can't run the backward of two calls of a head that shares its group.
            if not name.endswith("head with norm"):
                losses.append(loss_of(call, each, tokens.flip(1)))
                with torch.no_grad():
                    call(each, tokens)
            sum(losses).backward()
        for n, p in reference.named_parameters():
            assert close(full(model.get_parameter(n).grad), p.grad), (name, n)


@distributed(world_size=4)
def test_writes_without_gradients_are_seen():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)

    def add(p):
        p.add_(0.5)

    def add_to_shard(p):
        p.to_local().add_(0.5)

    for write in (add, add_to_shard):
        torch.manual_seed(0)
        reference = own()
        torch.manual_seed(0)
        model = apply_fsdp2(own(), mesh, reshard_after_forward=False)
        shards = list(model.parameters())
        logits(model, tokens)
        with torch.no_grad():
            for p in shards:
                write(p)
            for p in reference.parameters():
                p.add_(0.5)
            assert close(logits(model, tokens), logits(reference, tokens))


@distributed(world_size=4)
def test_nothing_is_gathered_again_without_need():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)

    def gathers(fn):
        with CollectiveLog() as log:
            fn()
        return log.count("allgather")

    def by_chunks(model):
        hidden = model(tokens, return_hidden=True)
        return sum(model.output(chunk).sum() for chunk in hidden.chunk(2, dim=1))

    # Five groups. Gradients of the last step are still there, as with zero_grad before backward.
    model = apply_fsdp2(own(), mesh)
    losses = []
    for _ in range(2):
        assert gathers(lambda: losses.append(by_chunks(model))) == 5
        losses.pop().backward()
    model.zero_grad()
    assert gathers(lambda: losses.append(by_chunks(model))) == 5
    assert gathers(lambda: losses.append(by_chunks(model))) == 3  # head and root are there
    sum(losses).backward()

    kept = apply_fsdp2(own(), mesh, reshard_after_forward=False)
    with torch.no_grad():
        assert [gathers(lambda: kept(tokens)) for _ in range(3)] == [5, 5, 5]
    window = []
    for last in (False, False, True):
        with accumulate_grads(kept, last=last, reduce="every"):
            window.append(gathers(lambda: kept(tokens).sum().backward()))
    assert window == [5, 0, 0]


@distributed(world_size=2)
def test_a_forward_that_raises_ends():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)
    model = apply_fsdp2(own(), mesh)
    with torch.no_grad(), pytest.raises(IndexError):
        model(tokens + 1000)
    model.reset_iter_state()
    with torch.no_grad():
        model.output(torch.randn(2, 16))
    assert gathered(model) == []


@distributed(world_size=1)
def test_the_whole_model_compiled():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)
    model = apply_fsdp2(own(n_layers=1), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.compile(backend="eager")
    for _ in range(2):
        loss_of(logits, model, tokens).backward()
        logits(model, tokens)
        optimizer.step()
        with torch.no_grad():
            got = logits(model, tokens)
        assert gathered(model) == []
    model._compiled_call_impl = None
    assert close(got, logits(model, tokens).detach())


class HeadInBackward(torch.autograd.Function):
    """Calls the head in the forward and again in the backward, both without gradients."""

    @staticmethod
    def forward(ctx, hidden, head):
        ctx.head = head
        ctx.save_for_backward(hidden)
        return head(hidden)

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            ctx.head(*ctx.saved_tensors)
            weight = ctx.head.weight  # still gathered
        assert not isinstance(weight, DTensor)
        return grad @ weight, None


@distributed(world_size=2)
def test_a_forward_inside_a_backward_frees_nothing():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    tokens = batch(1)

    def checkpointed(each, tokens):
        return checkpoint(each, tokens, use_reentrant=False)

    def checkpointed_head(each, tokens):
        hidden = each(tokens, return_hidden=True)
        return checkpoint(each.output, hidden, use_reentrant=False)

    def own_function(each, tokens):
        return HeadInBackward.apply(each(tokens, return_hidden=True), each.output)

    for call in (checkpointed, checkpointed_head, own_function):
        for options in ({}, HEAD_AND_NORM, FALSE):
            torch.manual_seed(0)
            reference = own()
            torch.manual_seed(0)
            model = apply_fsdp2(own(), mesh, **options)
            for each in (model, reference):
                for _ in range(2):
                    loss_of(call, each, tokens).backward()
            for n, p in reference.named_parameters():
                got = model.get_parameter(n).grad
                assert (got is None) == (p.grad is None), (call, options, n)
                assert p.grad is None or close(full(got), p.grad), (call, options, n)


@distributed(world_size=2)
def test_layers_that_are_unfrozen_after_an_evaluation_train():
    mesh = fsdp_mesh(build_mesh(device_type="cpu"))
    for options in ({}, FALSE, TWO):
        torch.manual_seed(0)
        reference = own()
        model = copy.deepcopy(reference)
        for layer in (*model.layers.values(), *reference.layers.values()):
            layer.requires_grad_(False)
        apply_fsdp2(model, mesh, **options)
        for each in (model, reference):
            sgd = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(4):
                if step == 2:
                    each.layers["1"].requires_grad_(True)
                loss_of(logits, each, batch(step)).backward()
                sgd.step()
                sgd.zero_grad()
                with torch.no_grad():
                    each(batch(step))
        for name, p in reference.named_parameters():
            assert close(full(model.get_parameter(name)).detach(), p.detach()), (options, name)
