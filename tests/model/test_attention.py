from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ptx.model import ModelArgs
from ptx.model._attention import Attention, AttentionCore
from ptx.model._mask import mask_info
from ptx.model._rope import rope_tables

ARGS = ModelArgs(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=8)
SEQ = 6
POSITIONS = torch.arange(SEQ)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2]])


def by_hand(q, k, v, allowed):
    """Query head h reads kv head h // group."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // group].transpose(-1, -2) / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[:, h // group])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "both"])
def test_core_matches_explicit_attention(heads, kv_heads, kind):
    torch.manual_seed(0)
    window = 3 if kind in {"window", "both"} else None
    documents = DOCUMENTS if kind in {"documents", "both"} else None
    mask = mask_info(POSITIONS, documents, window)
    allowed = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    if mask.dense is not None:
        allowed = mask.dense.squeeze(1)
    q = torch.randn(2, heads, SEQ, 8, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, SEQ, 8, requires_grad=True) for _ in range(2))
    seed = torch.randn_like(q)

    got, want = AttentionCore()(q, k, v, mask), by_hand(q, k, v, allowed)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(got, (q, k, v), seed),
        torch.autograd.grad(want, (q, k, v), seed),
        atol=2e-6,
        rtol=1e-5,
    )


def test_plain_causal_uses_no_mask_tensor(monkeypatch):
    """A mask tensor would rule out flash attention."""
    seen = []
    real = F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q, kv = torch.randn(1, 4, SEQ, 8), torch.randn(1, 2, SEQ, 8)
    for window in (None, SEQ):
        AttentionCore()(q, kv, kv, mask_info(POSITIONS, None, window))
    AttentionCore()(q, q, q, mask_info(POSITIONS, None, None))
    assert seen == [
        {"is_causal": True, "enable_gqa": True},
        {"is_causal": True, "enable_gqa": True},
        {"is_causal": True, "enable_gqa": False},
    ]


def test_core_refuses_to_ignore_a_mask_that_was_not_built():
    x = torch.randn(2, 2, SEQ, 8)
    for documents, window in ((DOCUMENTS, None), (None, 2)):
        with pytest.raises(ValueError, match="dense_masks = True"):
            AttentionCore()(x, x, x, mask_info(POSITIONS, documents, window, dense=False))
    AttentionCore()(x, x, x, mask_info(POSITIONS, None, SEQ, dense=False))


def test_core_is_a_seam_without_parameters():
    attention = Attention(ARGS)
    assert not list(attention.core.parameters())
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    calls = []

    class Spy(torch.nn.Module):
        def forward(self, q, k, v, mask):
            calls.append((q.shape, k.shape, v.shape, mask))
            return torch.zeros_like(q)

    attention.core = Spy()
    mask = mask_info(POSITIONS, None, None)
    out = attention(torch.randn(2, SEQ, 32), rope_tables(ARGS, POSITIONS), mask)
    assert torch.equal(out, torch.zeros(2, SEQ, 32))
    assert calls == [((2, 4, SEQ, 8), (2, 2, SEQ, 8), (2, 2, SEQ, 8), mask)]


def test_heads_are_counted_from_the_projections():
    """Two halves of the heads, each run as a rank of tp 2 would, sum to the whole."""
    torch.manual_seed(0)
    whole = Attention(replace(ARGS, qk_norm=True))
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, rope = torch.randn(2, SEQ, 32), rope_tables(ARGS, POSITIONS)
    mask = mask_info(POSITIONS, DOCUMENTS, 3)
    parts = []
    for rank in range(2):
        part = Attention(replace(ARGS, qk_norm=True))
        part.load_state_dict(whole.state_dict())
        for name in ("wq", "wk", "wv"):
            linear = getattr(part, name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2)[rank])
        part.wo.weight = torch.nn.Parameter(part.wo.weight.chunk(2, dim=1)[rank])
        parts.append(part(x, rope, mask))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, rope, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rotated", [True, False])
def test_T11_sequence_of_another_length_is_refused(rotated):
    attention = Attention(ARGS)
    rope = rope_tables(ARGS, POSITIONS) if rotated else None
    with pytest.raises(ValueError, match=r"12 positions.* made for 6; under sequence parallel"):
        attention(torch.randn(2, 12, 32), rope, mask_info(POSITIONS, None, None))
