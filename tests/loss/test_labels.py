from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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


@pytest.mark.slow  # imports the compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch, of its own doing
def test_compiled_callers_get_one_graph_for_any_number_of_rows(one_rank: DeviceMesh) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for loss_fn in (
        partial(cross_entropy, softcap=3.0, z_loss=0.1),
        partial(vocab_parallel_ce, mesh=one_rank, vocab_size=7, label_smoothing=0.1),
    ):
        graphs.clear()
        compiled = torch.compile(lambda x, y, fn=loss_fn: fn(x, y), fullgraph=True, backend=count)
        for rows in (5, 6, 9):
            logits = torch.randn(rows, 7, requires_grad=True)
            labels = torch.arange(rows) % 7
            labels[0] = -100
            loss, want = compiled(logits, labels), loss_fn(logits, labels)
            torch.testing.assert_close(loss, want)
            grads = [torch.autograd.grad(value, logits)[0] for value in (loss, want)]
            torch.testing.assert_close(*grads)
        assert len(graphs) <= 2  # the first shape is taken as fixed
        with pytest.raises(RuntimeError, match=r"\[0, 7\)"):
            compiled(logits, labels + 7)
