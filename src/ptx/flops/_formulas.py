"""How many FLOPs one call of an op takes, from its arguments."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry

from ptx.flops._attention import ATTENTION, FLEX
from ptx.flops._flop_count import Causal

# Of an op's arguments and ``out``, its result.
Formula = Callable[..., int]

# Ops of these namespaces are known: what isn't like a product below counts nothing.
_KNOWN = frozenset({"aten", "prim", "prims", "profiler"})
_COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"}
)

# A component of an aten op's name, between underscores, that speaks of a product of matrices or of
# something as costly as one. tests/flops/test_formulas.py goes through all of torch's ops.
_LIKE_A_PRODUCT = re.compile(
    r"(\w*mm|(add)?mv|addr|ger|outer|v?dot|matmul|bilinear|trilinear|linear|tensordot|einsum|kron"
    r"|conv\d?d?|conv(olution|\d?d?|tbc)|attention|attn|rnn|lstm|gru|fft|c2c|c2r|r2c|[cp]dist|euclidean"
    r"|cholesky|svd|eigh?|eigvalsh?|qr|orgqr|ormqr|geqrf|lu|ldl|solve|spsolve|lstsq|inv|inverse|pinv"
    r"|det|slogdet|householder|matrix|transformer)"
)
# They have such a component in their names, and add and multiply elements.
_ELEMENTWISE = frozenset(
    {
        "_thnn_fused_lstm_cell",
        "_thnn_fused_lstm_cell_backward",
        "_thnn_fused_lstm_cell_backward_impl",
        "_thnn_differentiable_lstm_cell_backward",
        "_thnn_fused_gru_cell",
        "_thnn_fused_gru_cell_backward",
        "_thnn_differentiable_gru_cell_backward",
        "_transform_bias_rescale_qkv",
        "slice_inverse",
        "fft_fftfreq",
        "fft_rfftfreq",
        "fft_fftshift",
        "fft_ifftshift",
        "linalg_vector_norm",
        "linalg_cross",
        "linalg_diagonal",
        "_cudnn_rnn_flatten_weight",
        "_use_cudnn_rnn_flatten_weight",
    }
)


def flops_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, causal: Causal) -> int:
    """FLOPs of one call; 0 for an op without products.

    Args:
        op: An OpOverload or a HigherOrderOperator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its result.
        causal: How attention with ``is_causal=True`` counts.

    Raises:
        ValueError: An op that nothing is known about.
    """
    packet = op if isinstance(op, HigherOrderOperator) else op._overloadpacket
    if isinstance(op, OpOverload) and op.namespace == "aten":
        base = packet.__name__.removesuffix("_")  # in place
        if base in ATTENTION:
            return ATTENTION[base](op, args, kwargs, causal)
        if base in _PRODUCTS:
            return _PRODUCTS[base](*_shapes(args), out=_shape(out))
        if base in _WITH_FLAGS:
            return _WITH_FLAGS[base](*args, out=out)
    if isinstance(op, HigherOrderOperator) and op.name() in FLEX:
        return FLEX[op.name()](*args)
    if packet in flop_registry:  # what somebody registered with torch
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if isinstance(op, OpOverload):
        if op.namespace in _COLLECTIVES:
            raise ValueError(
                f"{op} communicates: a part that computes on some of the ranks would be counted as"
                " if it were the whole; count the model before it is made parallel"
            )
        if op.namespace in _KNOWN and not is_like_a_product(packet.__name__):
            return 0
    raise ValueError(
        f"{op} has no formula; register one with torch, f(*args, out_val, **kwargs) -> FLOPs of a"
        f" call, 0 if it multiplies no matrices: torch.utils.flop_counter.register_flop_formula("
        f"{_written(op)}, get_raw=True)(f)"
    )


def label_of(op: Any) -> str:
    """A short name: "mm", "attention", "convolution", "mylib.gemm"."""
    if isinstance(op, HigherOrderOperator):
        name = str(op.name())
        return "attention" if name in FLEX else name
    base = str(op._overloadpacket.__name__).removesuffix("_")
    if op.namespace != "aten":
        return f"{op.namespace}.{base}"
    if base in ATTENTION:
        return "attention"
    return "convolution" if "conv" in base else base


@functools.cache
def is_like_a_product(name: str) -> bool:
    """Whether an aten op multiplies matrices, by its name without namespace and overload."""
    if name in _ELEMENTWISE:
        return False
    return any(_LIKE_A_PRODUCT.fullmatch(part) for part in name.split("_"))


def _written(op: Any) -> str:
    packet = op if isinstance(op, HigherOrderOperator) else op._overloadpacket
    space = "higher_order" if isinstance(op, HigherOrderOperator) else op.namespace
    return f"torch.ops.{space}.{packet.__name__ if space != 'higher_order' else op.name()}"


def _shapes(args: Sequence[Any]) -> list[Any]:
    return [_shape(arg) for arg in args]


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _product(a: tuple[int, ...], b: tuple[int, ...], *_: Any, out: Any = None) -> int:
    """[..., m, k] @ [k, n] or [..., k, n], and vectors in place of either."""
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _added(_: Any, a: tuple[int, ...], b: tuple[int, ...], *__: Any, out: Any = None) -> int:
    return _product(a, b)


def _outer(a: tuple[int, ...], b: tuple[int, ...], *_: Any, out: Any = None) -> int:
    return 2 * math.prod(a) * math.prod(b)


def _added_outer(_: Any, a: Any, b: Any, *__: Any, out: Any = None) -> int:
    return _outer(a, b)


def _transposed_weight(
    a: tuple[int, ...], weight: tuple[int, ...], *_: Any, out: Any = None
) -> int:
    """[m, k] @ [n, k].T."""
    return 2 * math.prod(a) * weight[0]


def _grouped(a: tuple[int, ...], b: tuple[int, ...], *_: Any, out: Any = None) -> int:
    """Rows of a 2-D side belong to one group each: [T, k] x [E, k, n], [E, m, k] x [k, T], ..."""
    if len(a) == 2:
        return 2 * math.prod(a) * b[-1]
    return 2 * math.prod(a[-2:]) * b[-1] * (a[0] if len(b) == 3 else 1)


def _scaled_grouped(a: Any, b: Any, *_: Any, out: Any = None) -> int:
    return _grouped(a, b)


def _conv_flops(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    # Each element of the smaller side (of the input, if transposed) meets one filter of
    # C_in / groups x C_out channels; padding counts as elements.
    image = x if transposed else out
    positions = image.shape[0] * math.prod(image.shape[2:])
    return 2 * positions * weight.numel()


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool = False,
    *_: Any,
    out: Tensor,
) -> int:
    return _conv_flops(x, weight, out, transposed)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    *,
    out: Any,
) -> int:
    # Of input and weight each as many as the forward. torch's own formula counts the weight's
    # ``groups`` times.
    return _conv_flops(x, weight, grad, transposed) * sum(output_mask[:2])


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, new_a: Any, new_b: Any, new_c: Any, *_: Any, out: Any = None
) -> int:
    """Sums products of three factors, each first given dims of 1: nn.Bilinear's."""
    shapes = []
    for factor, dims in ((a, new_a), (b, new_b), (c, new_c)):
        shape = list(factor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    whole: tuple[int, ...] = torch.broadcast_shapes(*shapes)
    return 2 * math.prod(whole)


# By the op's name without overload and trailing underscore, from shapes.
_PRODUCTS: dict[str, Formula] = {
    "mm": _product,
    "bmm": _product,
    "_int_mm": _product,
    "_scaled_mm": _product,
    "_scaled_mm_v2": _product,
    "mv": _product,
    "dot": _product,
    "vdot": _product,
    "addmm": _added,
    "_addmm_activation": _added,
    "baddbmm": _added,
    "addbmm": _added,
    "addmv": _added,
    "ger": _outer,
    "outer": _outer,
    "addr": _added_outer,
    "_weight_int8pack_mm": _transposed_weight,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _scaled_grouped,
    "_scaled_grouped_mm_v2": _scaled_grouped,
}
# From the arguments themselves.
_WITH_FLAGS: dict[str, Formula] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    "_trilinear": _trilinear,
}
