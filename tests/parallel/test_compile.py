import functools
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

import harness
from harness import distributed
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._ac import apply_ac
from ptx.parallel._compile import apply_compile
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._tp import apply_tp

ARGS = ModelArgs(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=13)
MODES = (None, "full", "selective")


@pytest.fixture(autouse=True)
def _quiet():
    # Dynamo looks at `.grad` of a block's input (torch 2.13).
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf"
        )
        torch._dynamo.reset()
        yield


def build(**changes):
    torch.manual_seed(0)
    return Transformer(ModelArgs(**{**vars(ARGS), **changes}))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(13, (4, 8), generator=generator), torch.randint(
        13, (4, 8), generator=generator
    )


def step(model, tokens, labels):
    logits = model(tokens)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def gradients(model):
    return {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
        for n, p in model.named_parameters()
    }


def on_mesh(degrees, compiled_first):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    mesh = build_mesh(**degrees, device_type="cpu")
    reference = build()
    tokens, labels = batch()
    loss = step(reference, tokens, labels)
    want = gradients(reference)
    data = data_mesh(mesh)
    mine = slice(
        data.get_local_rank() * 4 // data.size(), (data.get_local_rank() + 1) * 4 // data.size()
    )
    import time

    for mode in MODES:
        t = time.time()
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        model = apply_tp(build(), mesh["tp"])
        if compiled_first:
            apply_compile(model, backend=counter)
        if mode:
            apply_ac(model, mode)
        if not compiled_first:
            apply_compile(model, backend=counter)
        if mesh.size() > mesh["tp"].size():
            apply_fsdp2(model, fsdp_mesh(mesh))
        step(model, tokens[mine], labels[mine])
        err = max(
            float((g - want[n]).abs().max() / want[n].abs().max())
            for n, g in gradients(model).items()
        )
        print(mode, err, counter.frame_count, round(time.time() - t, 1), flush=True)
    raise 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "degrees,n", [({"tp": 2}, 2), ({"dp_shard": 2}, 2), ({"tp": 2, "dp_shard": 2}, 4)]
)
def test_x(degrees, n, first):
    harness.run(on_mesh, n, degrees, first, timeout=100)
