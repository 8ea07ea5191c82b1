"""The FLOPs of a `ptx.Transformer` from its arguments alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ptx.flops._attention import attention_flops, attention_pairs
from ptx.flops._flop_count import Causal, FlopCount, Phase, count_of
from ptx.model import ModelArgs

Piece = tuple[str, str, Phase, int]


def transformer_flops(
    args: ModelArgs,
    batch: int,
    seq: int,
    *,
    causal: Causal = "full",
    ac: Literal["none", "full", "selective"] = "none",
) -> FlopCount:
    """FLOPs of forward and backward of ``Transformer(args)``, in closed form.

    The number that `estimate_flops_fake` counts, of one document per sequence and all parameters
    trained: per token 2 x 3 for each weight of a matrix (look-ups are free, a tied output isn't), and
    per layer 12 x n_heads x head_dim x pairs / seq for attention, whose pairs are seq x seq, or with
    "half" seq (seq + 1) / 2. A window shorter than ``seq`` is a mask, and counts the square.

    Args:
        args: The model.
        batch: Sequences, over all ranks.
        seq: Tokens of each.
        causal: "full" or "half".
        ac: What `apply_ac` does to every block; it changes ``recompute`` only.

    Returns:
        A `FlopCount`, equal in every attribute to the counted one.

    Raises:
        ValueError: batch or seq below 1, or an unknown option.

    Cost: microseconds.
    """
    wrong = [
        f"{name} must be an int from 1, got {value!r}"
        for name, value in (("batch", batch), ("seq", seq))
        if not isinstance(value, int) or value < 1
    ]
    if causal not in ("full", "half"):
        wrong.append(f'causal must be "full" or "half", got {causal!r}')
    if ac not in ("none", "full", "selective"):
        wrong.append(f'ac must be "none", "full" or "selective", got {ac!r}')
    if wrong:
        raise ValueError("transformer_flops: " + "; ".join(wrong))
    return count_of(_pieces(args, batch, seq, causal, ac), causal)


def _pieces(args: ModelArgs, batch: int, seq: int, causal: Causal, ac: str) -> Iterator[Piece]:
    tokens, dim, ffn = batch * seq, args.dim, args.ffn_width
    q_width, kv_width = args.n_heads * args.head_width, args.kv_heads * args.head_width
    # In the order they run: name, inputs, outputs, bias.
    before = [
        ("attention.wq", dim, q_width, args.qkv_bias),
        ("attention.wk", dim, kv_width, args.qkv_bias),
        ("attention.wv", dim, kv_width, args.qkv_bias),
    ]
    after = [
        ("attention.wo", q_width, dim, args.o_bias),
        ("feed_forward.w1", dim, ffn, args.mlp_bias),
        ("feed_forward.w3", dim, ffn, args.mlp_bias),
        ("feed_forward.w2", ffn, dim, args.mlp_bias),
    ]
    for layer in range(args.n_layers):
        block = f"layers.{layer}."
        # The last product isn't repeated, as no gradient needs its result. "selective" keeps every
        # second one, and attention.
        products = [*before, *after]
        repeated = {"none": [], "full": products[:-1], "selective": products[:-1:2]}[ac]
        for product in before:
            yield from _linear(block, product, tokens, product in repeated)
        yield from _attention(args, block, layer, batch, seq, causal, ac == "full")
        for product in after:
            yield from _linear(block, product, tokens, product in repeated)
    yield from _linear("", ("output", dim, args.vocab_size, False), tokens, False)


def _linear(
    block: str, product: tuple[str, int, int, bool], tokens: int, repeated: bool
) -> Iterator[Piece]:
    name, inputs, outputs, bias = product
    flops = 2 * tokens * inputs * outputs
    op = "addmm" if bias else "mm"
    yield block + name, op, "forward", flops
    yield block + name, "mm", "backward", 2 * flops  # of the input, and of the weight
    if repeated:
        yield block + name, op, "recompute", flops


def _attention(
    args: ModelArgs, block: str, layer: int, batch: int, seq: int, causal: Causal, repeated: bool
) -> Iterator[Piece]:
    window = args.window(layer)
    is_causal = window is None or window >= seq
    pairs = attention_pairs(seq, seq, is_causal=is_causal, causal=causal)
    shape = (batch, args.n_heads, seq, args.head_width)
    flops, core = attention_flops(shape, shape, pairs), block + "attention.core"
    yield core, "attention", "forward", flops
    yield core, "attention", "backward", 2 * flops
    if repeated:
        yield core, "attention", "recompute", flops
