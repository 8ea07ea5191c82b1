"""token_logprobs over a head whose vocabulary is split; test_head.py has it under FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from collectives import CollectiveLog
from harness import distributed
from loss import conformance
from loss.token_reference import OPTIONS, as_loss, cases, close, inputs, reference, upstreams
from ptx.loss import token_logprobs


@distributed(world_size=2)
def test_conformance_on_two_tp_ranks() -> None:
    tp = init_device_mesh("cpu", (2,))
    for case in cases(7):
        conformance.check(as_loss(3, tp), case, roundings=2)


@distributed(world_size=4)
def test_tp_is_one_process_in_one_exchange() -> None:
    tp = init_device_mesh("cpu", (4,))
    for rows, options in ((13, OPTIONS[0]), (12, OPTIONS[2]), (3, OPTIONS[1]), (13, OPTIONS[2])):
        hidden, weight, bias, labels = inputs()
        hidden = torch.cat([hidden, hidden[:, :1]], 1)
        labels = torch.cat([labels, labels[:, :1]], 1).clamp(max=rows - 1)
        given = hidden, weight[:rows], bias[:rows]
        upstream = upstreams(labels)[-1]
        want, want_grads = reference(given, labels, upstream, **options)
        for chunk, layout in ((None, None), (3, Replicate()), (3, Shard(1)), (None, Shard(1))):
            head, own = (distribute_tensor(t, tp, [Shard(0)]).requires_grad_() for t in given[1:])
            states = hidden.clone()
            if layout is not None:
                states = distribute_tensor(states, tp, [layout])
            states.requires_grad_()
            with CollectiveLog() as forward:
                got = token_logprobs(
                    states, head, labels, bias=own, chunk_tokens=chunk, entropy=True, **options
                )
            with CollectiveLog() as backward:
                torch.autograd.backward(got, upstream)
            kept, split = int((labels != -100).sum()), layout == Shard(1)
            assert forward.calls["allgather_", 4 * 4 * kept] == 1, forward.calls
            assert forward.count() == 1 + split, forward.calls
            assert backward.count("reduce_scatter") == split, backward.calls
            assert backward.count() == 1, backward.calls
            for result, expected in zip(got, want):
                close(result, expected, 2e-6)
                everyone = [torch.empty_like(result) for _ in range(4)]
                dist.all_gather(everyone, result.detach())
                assert all(torch.equal(result, other) for other in everyone)
            for tensor, expected in zip((states, head, own), want_grads):
                grad = tensor.grad
                close(grad.full_tensor() if isinstance(grad, DTensor) else grad, expected, 2e-6)


@distributed(world_size=4)
def test_tp_masked_shards_and_labels_at_the_edges() -> None:
    tp = init_device_mesh("cpu", (4,))
    hidden, weight, bias, _ = inputs()
    labels = torch.tensor([0, 3, 4, 7, 8, 11, 12, -100, 1, 2, 5, 6, 9, 10]).reshape(2, 7)
    far = bias.clone()
    far[4:8] = -200.0  # one rank's share has hardly any probability
    upstream = upstreams(labels)[-1]
    want, want_grads = reference((hidden, weight, far), labels, upstream)
    head, own = (distribute_tensor(t, tp, [Shard(0)]).requires_grad_() for t in (weight, far))
    got = token_logprobs(hidden, head, labels, bias=own, entropy=True)
    grads = torch.autograd.grad(got, (head, own), upstream)
    for result, expected in zip(got, want):
        close(result, expected, 2e-6)
    for grad, expected in zip(grads, want_grads[1:]):
        close(grad.full_tensor(), expected, 2e-6)

    masked = bias.clone()
    masked[4:8] = -torch.inf  # none at all
    own = distribute_tensor(masked, tp, [Shard(0)]).requires_grad_()
    got = token_logprobs(hidden, head, labels * 0 + 3, bias=own, entropy=True)
    kept = [*range(4), *range(8, 13)]
    upstream = [torch.ones(2, 7), torch.ones(2, 7)]
    want, want_grads = reference((hidden, weight[kept], bias[kept]), labels * 0 + 3, upstream)
    for result, expected in zip(got, want):
        close(result, expected, 2e-6)
    grads = torch.autograd.grad(got, (head, own), upstream)
    for grad, expected in zip(grads, want_grads[1:]):
        close(grad.full_tensor()[kept], expected, 2e-6)
        assert torch.equal(grad.full_tensor()[4:8], torch.zeros_like(expected[:4]).float())
