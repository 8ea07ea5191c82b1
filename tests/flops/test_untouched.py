"""A count leaves everything as it was, whether it succeeds or raises half-way."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import ptx
from ptx.flops import estimate_flops_fake


class Restless(nn.Module):
    """Its forward changes all that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(3))
        self.calls = 0
        self.kept: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.fails_at = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps.add_(1)
        self.last = x = self.drop(self.norm(self.linear(x)))
        self.kept.append(x)
        self.cache["x"] = x
        torch.manual_seed(1)
        random.random()
        np.random.rand()
        if self.fails_at == "forward":
            raise KeyError("forward")
        if self.fails_at == "op":
            x = torch.fft.rfft(x).real
        if self.fails_at == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, _: Tensor) -> None:
        raise KeyError("backward")


def state_of(model: Restless) -> dict:
    accelerator_rng = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {
        "attributes": {k: id(v) for k, v in vars(model).items()},
        "parameters": {n: (id(p), p.grad, p.requires_grad) for n, p in model.named_parameters()},
        "values": {n: v.clone() for n, v in model.state_dict().items()},
        "containers": (list(model.kept), dict(model.cache), model.last, model.calls),
        "training": {n: m.training for n, m in model.named_modules()},
        "hooks": [dict(m._forward_hooks) for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "global hooks": (
            len(torch_modules._global_forward_hooks),
            len(torch_modules._global_forward_pre_hooks),
            len(torch_modules._global_forward_hooks_always_called),
        ),
        "random": (torch.get_rng_state(), random.getstate(), *accelerator_rng),
        "numpy": np.random.get_state()[1].tolist(),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.autograd._get_sequence_nr() >= 0,
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "flags": (
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch._C._is_multithreading_enabled(),
        ),
    }


def assert_same(now: dict, before: dict) -> None:
    for key, value in before.items():
        if key == "values":
            assert now[key].keys() == value.keys()
            assert all(torch.equal(now[key][n], v) for n, v in value.items())
        elif key == "random":
            assert torch.equal(now[key][0], value[0])
            assert now[key][1] == value[1]
        else:
            assert now[key] == value, key


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails_at", ["", "forward", "op", "backward"])
def test_model_and_process_stay_as_they_were(fails_at, training):
    model = Restless().train(training)
    model.fails_at = fails_at
    seen: list[Tensor] = []
    model.linear.register_forward_hook(lambda module, args, out: seen.append(out))
    model.linear.register_full_backward_hook(lambda module, *grads: seen.append(module))
    x = torch.randn(5, 8, requires_grad=True)
    before = state_of(model)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if fails_at:
                with pytest.raises((KeyError, ValueError)):
                    estimate_flops_fake(model, x)
            else:
                assert estimate_flops_fake(model, x).forward == 2 * 5 * 64
            assert torch.is_autocast_enabled("cpu") is autocast
    assert_same(state_of(model), before)
    assert x.grad is None
    assert not seen  # hooks ran on the copy, with a list of its own


def test_gradients_that_are_there_stay():
    model = nn.Linear(8, 8)
    model(torch.randn(2, 8)).sum().backward()
    gradient = model.weight.grad
    value = gradient.clone()
    estimate_flops_fake(model, torch.randn(2, 8))
    assert model.weight.grad is gradient
    assert torch.equal(gradient, value)


def test_arguments_stay():
    held = {"x": torch.randn(2, 8), "list": [torch.randn(2, 8, requires_grad=True)]}
    before = copy.copy(held)
    linear = nn.Linear(8, 8)

    def fn(held: dict) -> Tensor:
        out = linear(held.pop("x")) + linear(held["list"].pop())
        held["out"] = out
        return out

    estimate_flops_fake(fn, held)
    assert held.keys() == before.keys()
    assert len(held["list"]) == 1
    assert held["list"][0].grad is None


def test_the_model_trains_on_afterwards():
    args = ptx.ModelArgs(dim=32, n_layers=1, n_heads=4, vocab_size=50, multiple_of=16)
    tokens = torch.randint(50, (2, 8))

    def losses(count: bool) -> list[float]:
        torch.manual_seed(0)
        model = ptx.apply_ac(ptx.Transformer(args), "full")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        found = []
        for _ in range(3):
            if count:
                estimate_flops_fake(model, tokens)
            loss = ptx.cross_entropy(model(tokens), tokens)
            loss.backward()
            if count:
                estimate_flops_fake(model, tokens)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(count=True) == losses(count=False)


def test_parameter_hooks_do_not_run():
    model = nn.Linear(8, 8)
    called: list[Tensor] = []
    model.weight.register_hook(called.append)
    model.weight.register_post_accumulate_grad_hook(called.append)
    estimate_flops_fake(model, torch.randn(2, 8))
    assert not called


def test_memory_is_not_doubled():
    # 16 GB of parameters that were never written to cost nothing; a copy of them would.
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(4)))
    before = ptx.memory_report("cpu").allocated
    estimate_flops_fake(model, torch.empty(2**20, 2**15, device="meta"))
    assert ptx.memory_report("cpu").allocated - before < 2**28
