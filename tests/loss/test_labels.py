from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from harness import distributed
from ptx.loss import cross_entropy, token_mean, token_scale, vocab_parallel_ce


@distributed(world_size=1)  # a rank has imported what these tensors need, which takes seconds
def test_off_the_cpu_no_value_is_read_and_no_shape_depends_on_one() -> None:
    # Meta tensors have no values, so they refuse both; so do fake ones that say they are on CPU.
    tp = init_device_mesh("cpu", (1,))
    for device, mode in (("meta", nullcontext()), ("cpu", FakeTensorMode())):
        with mode:
            logits = torch.zeros(4, 7, requires_grad=True, device=device)
            labels = torch.zeros(4, dtype=torch.long, device=device)
            scale = token_scale([labels, labels], tp, vocab_size=7)
            for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}):
                for loss in (
                    cross_entropy(logits, labels, **options),
                    vocab_parallel_ce(logits, labels, tp, vocab_size=6, padded_size=7, **options),
                ):
                    (grad,) = torch.autograd.grad(loss * scale, logits)
                    assert grad.shape == (4, 7)
                    assert token_mean(loss, 4, tp).shape == ()
