import math

import pytest
import torch
from torch import Tensor, nn

import ptx
from ptx.flops import FlopCount, estimate_flops_fake, transformer_flops

BASE = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 53, "multiple_of": 16}
BATCH, SEQ = 3, 12
VARIANTS = {
    "plain": {},
    "gqa": {"n_kv_heads": 2},
    "one kv head": {"n_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "head_dim": {"head_dim": 16, "n_kv_heads": 2},
    "qkv bias": {"qkv_bias": True},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "window": {"sliding_window": 5},
    "window as long as the sequence": {"sliding_window": SEQ},
    "window in one layer": {"sliding_window": 5, "window_layers": (True, False)},
    "no rope": {"nope_layers": (True, False)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_equals_the_count_in_every_attribute(variant, ac):
    args = ptx.ModelArgs(**BASE, **VARIANTS[variant])
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    for device, causal in (("cpu", "full"), ("meta", "half")):
        with torch.device(device):
            model = ptx.Transformer(args)
        if ac != "none":
            ptx.apply_ac(model, ac)
        count = estimate_flops_fake(model, tokens, causal=causal)
        assert count == transformer_flops(args, BATCH, SEQ, causal=causal, ac=ac)


def test_P03_both_products_of_attention_count():
    count = transformer_flops(ptx.preset("llama3-8b"), 1, 8192)
    assert count.total == 57_912_852_480 * 8192
    assert count.by_op["mm"].total == 45_027_950_592 * 8192
    assert count.by_op["attention"].total == 12_884_901_888 * 8192
    with torch.device("meta"):
        model = ptx.Transformer(ptx.preset("llama3-8b"))
    assert estimate_flops_fake(model, torch.zeros(1, 8192, dtype=torch.long)) == count


def test_P04_causal_full_and_half_at_a_long_context():
    args, seq = ptx.preset("llama3-8b"), 131_072
    full, half = (transformer_flops(args, 1, seq, causal=c) for c in ("full", "half"))
    assert full.total == 251_186_380_800 * seq
    # Half of the square is 148,107,165,696 a token; with the diagonal, a query more on average.
    assert half.total == (148_107_165_696 + 6 * 32 * 4096) * seq
    assert half.total == pytest.approx(148_107_165_696 * seq, rel=1e-5)
    assert (full.causal, half.causal) == ("full", "half")
    assert full.by_op["mm"] == half.by_op["mm"]


def test_wrong_arguments_are_listed_together():
    with pytest.raises(ValueError, match=r"batch must be.*seq must be.*causal must be.*ac must be"):
        transformer_flops(ptx.preset("debug"), 0, 2.5, causal="no", ac="some")


# Published conventions; docs/flops.md tabulates them


class GptBlock(nn.Module):
    """The block those formulas are about: equal heads, two matrices in the feed-forward."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Gpt(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*(GptBlock(dim, heads, width) for _ in range(layers)))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def count_gpt(batch, seq, ac=False, **sizes) -> tuple[FlopCount, Gpt]:
    with torch.device("meta"):
        model = Gpt(**sizes)
    if ac:
        ptx.apply_ac(model, "full", units=["blocks.*"])
    return estimate_flops_fake(model, torch.zeros(batch, seq, dtype=torch.long)), model


def test_megatrons_formula():
    # Narayanan et al., arXiv:2104.04473, section 5.1, and its form without recomputation.
    B, s, V, h, n = 4, 64, 97, 128, 3
    sizes = {"vocab": V, "dim": h, "layers": n, "heads": 8, "width": 4 * h}
    count, _ = count_gpt(B, s, ac=True, **sizes)
    assert count.total == 72 * B * s * n * h**2 * (1 + s / (6 * h) + V / (12 * n * h))
    megatron = 96 * B * s * n * h**2 * (1 + s / (6 * h) + V / (16 * n * h))
    last = 2 * B * s * 4 * h * h  # torch stops before each block's last product
    assert count.hardware_total == megatron - n * last


def test_palms_formula():
    # Chowdhery et al., arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token, with N all parameters.
    B, s, V, h, n, heads = 2, 64, 97, 128, 3, 8
    count, model = count_gpt(B, s, vocab=V, dim=h, layers=n, heads=heads, width=4 * h)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - V * h  # no look-up
    assert count.total == (6 * matrices + 12 * n * heads * (h // heads) * s) * B * s


# Hoffmann et al. (Chinchilla), arXiv:2203.15556, table A4: parameters in millions, layers, dim, FFN
# width, heads, key width, their FLOPs over 6 N D.
CHINCHILLA = [
    (73, 10, 640, 2560, 10, 64, 1.03),
    (305, 20, 1024, 4096, 16, 64, 1.10),
    (552, 24, 1280, 5120, 10, 128, 1.08),
    (1100, 26, 1792, 7168, 14, 128, 1.04),
    (1600, 28, 2048, 8192, 16, 128, 1.03),
    (6800, 40, 3584, 14336, 28, 128, 0.99),
]


@pytest.mark.parametrize(
    ("millions", "layers", "dim", "width", "heads", "key", "ratio"), CHINCHILLA
)
def test_chinchillas_ratios_to_6nd(millions, layers, dim, width, heads, key, ratio):
    vocab, seq = 32_000, 2048
    assert heads * key == dim
    sizes = {"vocab": vocab, "dim": dim, "layers": layers, "heads": heads, "width": width}
    count, model = count_gpt(1, seq, **sizes)
    # Theirs is ours without the head (the text counts embedding and head, the table doesn't), and
    # with 3 FLOPs for each element of the softmax.
    blocks = count.by_module["blocks"].total
    flops = blocks + 3 * layers * 3 * heads * seq**2
    # N: no embedding; relative positions (Transformer-XL's) are a matrix and two vectors a layer.
    parameters = sum(p.numel() for p in model.parameters()) - vocab * dim
    parameters += layers * (dim**2 + 2 * dim) + (2 * layers * 2 + 2) * dim  # and norms
    assert parameters == pytest.approx(millions * 1e6, rel=0.04)
    assert math.isclose(flops / (6 * parameters * seq), ratio, abs_tol=0.005001)
    assert f"{flops / (6 * parameters * seq):.2f}" == f"{ratio:.2f}"
