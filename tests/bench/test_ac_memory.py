"""What each mode of apply_ac keeps, how high memory rises, and what a step costs, eager and compiled."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from interleaved import interleaved
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ptx
from ptx.parallel._ac import apply_ac
from ptx.parallel._compile import apply_compile

# Dynamo looks at `.grad` of a block's input (torch 2.13), and only shows it where warnings are errors.
pytestmark = [
    pytest.mark.bench,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

ARGS = ptx.ModelArgs(
    dim=256, n_layers=8, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=128, max_seq_len=512
)
MODES = (None, "selective", "full")
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Bytes alive of what eager ops made while this was active, the model's own tensors aside."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        owned = (tensor for p in model.parameters() for tensor in (p, p.grad))
        self.seen = {tensor.untyped_storage()._cdata for tensor in owned}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key, size):
        self.seen.discard(key)
        self.now -= size


def build(mode, compiled):
    torch.manual_seed(0)
    model = ptx.Transformer(ARGS)
    if mode is not None:
        apply_ac(model, mode)
    if compiled:
        apply_compile(model)
    return model


def forward(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def kept_bytes(model, tokens):
    """Bytes between forward and backward, as far as autograd saves them, parameters aside."""
    owned = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, tokens)
    total = sum(storage.nbytes() for storage in saved.values())
    loss.backward()
    return total


def live_bytes(model, tokens):
    """After the forward, and at the peak of a step that finds its gradients allocated."""
    forward(model, tokens).backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    with LiveBytes(model) as live:
        loss = forward(model, tokens)
        gc.collect()
        kept = live.now
        loss.backward()
    return kept, live.peak


def test_memory_by_mode():
    tokens = torch.randint(ARGS.vocab_size, (2, 512))
    kept = {}
    print(f"\n{'mode':10s} {'kept, MiB':>10s} {'compiled':>10s} {'peak, MiB':>10s}")
    for mode in MODES:
        after, peak = live_bytes(build(mode, compiled=False), tokens)
        torch._dynamo.reset()
        model = build(mode, compiled=True)
        forward(model, tokens).backward()
        compiled = kept_bytes(model, tokens)
        kept[mode] = after, compiled, peak
        print(f"{mode!s:10s} {after / MIB:10.1f} {compiled / MIB:10.1f} {peak / MIB:10.1f}")
    for none, selective, full in zip(*(kept[mode] for mode in MODES), strict=True):
        assert none > selective > full


def test_step_time_by_mode_and_compile():
    tokens = torch.randint(ARGS.vocab_size, (2, 512))
    torch._dynamo.reset()
    steps = {}
    for compiled in (False, True):
        for mode in MODES:
            model = build(mode, compiled)
            steps[mode, compiled] = partial(lambda m: forward(m, tokens).backward(), model)
    seconds = interleaved(steps)
    floor = seconds[None, False]
    print(f"\n{'mode':10s} {'eager':>8s} {'compiled':>8s}   (1 = {floor:.3f} s of CPU time)")
    for mode in MODES:
        eager, compiled = (seconds[mode, c] / floor for c in (False, True))
        print(f"{mode!s:10s} {eager:8.2f} {compiled:8.2f}")
