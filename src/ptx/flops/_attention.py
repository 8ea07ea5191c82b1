"""Attention counts the same on every backend: 2 products forward, 4 backward."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ptx.flops._flop_count import Causal

LINEAR_CE = getattr(F, "linear_cross_entropy", None)  # new in torch 2.13
SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def attention_pairs(queries: int, keys: int, *, is_causal: bool, causal: Causal) -> int:
    """How many (query, key) pairs count.

    "half": a query meets the keys up to its own index, S (S + 1) / 2 pairs if there are as many
    keys as queries. torch's ``is_causal`` aligns the first query with the first key.
    """
    if not is_causal or causal == "full":
        return queries * keys
    square = min(queries, keys)
    return square * (square + 1) // 2 + max(0, queries - keys) * keys


def attention_flops(query: Sequence[int], value: Sequence[int], pairs: int) -> int:
    """Of the forward: scores and weighted sum of values; the backward is twice as much.

    Args:
        query: [..., heads, S, D]. Keys and values may have fewer heads: each query head meets one.
        value: [..., D_v].
        pairs: Per head and sequence.
    """
    return 2 * math.prod(query[:-2]) * pairs * (query[-1] + value[-1])


class FusedAttention(TorchFunctionMode):
    """Has ``F.scaled_dot_product_attention`` run as one op for any device, shape and dtype.

    Which kernel torch picks depends on the device, and where it picks none it writes the products
    out and nothing tells any more that they were causal. Here it is the op that a GPU takes: flash
    attention without a mask, memory-efficient attention with one; so policies that save attention
    by the names of these ops (`ptx.apply_ac`) find what they look for.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(func is sdpa for sdpa in SDPA):
            return _fused(*args, **kwargs)
        if func is LINEAR_CE and kwargs.get("options") is not None:
            return _in_parts(func, args, kwargs)
        return func(*args, **kwargs)


def _in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's loss over a head in chunks, whose op doesn't say which products it makes, as plain ops."""
    plain = functools.partial(func, **{**kwargs, "options": None})
    if kwargs.get("reduction") != "none":
        return plain(*args)
    # Its backward makes the logits once more.
    return checkpoint(plain, *args, use_reentrant=False)


@contextmanager
def flex_on_any_device() -> Iterator[None]:
    """While entered, ``flex_attention`` has a backward on CPU, as it has on GPUs, and isn't compiled."""
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:  # nobody uses it
        yield
        return
    # Private: the check that refuses tensors which require grad on CPU, and the flag that skips
    # torch.compile and a warning.
    changed = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    before = {name: getattr(flex, name) for name in changed}
    vars(flex).update(changed)
    try:
        yield
    finally:
        vars(flex).update(before)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    aten, shape = torch.ops.aten, query.shape
    flash = attn_mask is None and shape[-1] == value.shape[-1]
    if enable_gqa and not flash:
        key = key.repeat_interleave(shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(shape[-3] // value.shape[-3], dim=-3)
    # What comes before [S, D] broadcasts, but for heads in groups.
    keep = 3 if enable_gqa and flash else 2
    lead = torch.broadcast_shapes(*(t.shape[:-keep] for t in (query, key, value)))
    q, k, v = (_four_dims(t, *lead, *t.shape[-keep:]) for t in (query, key, value))
    if flash:
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
    else:
        if attn_mask is not None:
            attn_mask = _four_dims(attn_mask, *lead, shape[-2], key.shape[-2])
        out = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = out[0].reshape(*lead, *shape[-keep:-1], value.shape[-1])
    return result


def _four_dims(x: Tensor, *shape: int) -> Tensor:
    """Expanded to ``shape``, as [B, heads, S, D]."""
    if x.shape != shape:
        x = x.expand(shape)
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x if x.ndim == 4 else x.flatten(0, -4)


def _dense(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], causal: Causal) -> int:
    """An op over [B, heads, S, D], forward or backward."""
    given = _named(op, args, kwargs)
    query, key, value = given["query"].shape, given["key"].shape, given["value"].shape
    pairs = attention_pairs(
        query[-2], key[-2], is_causal=bool(given.get("is_causal", False)), causal=causal
    )
    return attention_flops(query, value, pairs) * _times(op)


def _token_major(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], causal: Causal
) -> int:
    """An op over [B, S, heads, D]."""
    given = _named(op, args, kwargs)
    query, key, value = (given[n] for n in ("query", "key", "value"))
    if any(given.get(n) is not None for n in ("cum_seq_q", "cu_seqlens_q")) or query.ndim != 4:
        raise ValueError(
            f"{op} attends over sequences of lengths that only tensors say; count a padded batch,"
            " or add up transformer_flops of each sequence"
        )
    is_causal = bool(given.get("is_causal", False)) or bool(given.get("custom_mask_type", 0))
    pairs = attention_pairs(query.shape[1], key.shape[1], is_causal=is_causal, causal=causal)
    return attention_flops(query.transpose(1, 2).shape, value.shape, pairs) * _times(op)


def _flex(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    # What a block mask leaves out is known to its tensors only: the square, as for every mask.
    return attention_flops(query.shape, value.shape, query.shape[-2] * key.shape[-2])


def _flex_backward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return 2 * _flex(query, key, value)


def _times(op: OpOverload) -> int:
    return 2 if "backward" in op._overloadpacket.__name__ else 1


def _named(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


_Attention = Callable[[OpOverload, Sequence[Any], dict[str, Any], Causal], int]
ATTENTION: dict[str, _Attention] = {
    f"{name}{end}": formula
    for name, formula in {
        "_scaled_dot_product_flash_attention": _dense,
        "_scaled_dot_product_flash_attention_for_cpu": _dense,
        "_scaled_dot_product_efficient_attention": _dense,
        "_scaled_dot_product_cudnn_attention": _dense,
        "_scaled_dot_product_fused_attention_overrideable": _dense,
        "_flash_attention": _token_major,
        "_efficient_attention": _token_major,
        "_cudnn_attention": _dense,
    }.items()
    for end in ("", "_backward", "_forward")
}
FLEX: dict[str, Callable[..., int]] = {
    "flex_attention": _flex,
    "flex_attention_backward": _flex_backward,
}
