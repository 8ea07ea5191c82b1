"""Nested state as JSON, with its tensors apart, so that a checkpoint never has to be unpickled."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Json = Any  # what json.dumps takes; {"$": [kind, ...]} stands for what JSON has no form of

TENSORS = (Tensor, nn.Parameter, nn.Buffer, DTensor)
FIX = "return numbers, strings, lists, dicts or tensors from state_dict()"


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Json:
    """``value`` as JSON; each tensor in it goes to ``tensors`` under its dotted name.

    Args:
        value: Dicts, lists, tuples and sets of numbers, strings, bytes, None, tensors, and numpy's
            numbers and arrays.
        name: Of ``value``, which the names of what is in it begin with.
        tensors: Filled in; the same objects, not copies.

    Raises:
        ValueError: Something of another type, two tensors of one name, or a value in itself.
    """
    return _encode(value, name, tensors, ())


def decode(tree: Json, name: str, tensors: Mapping[str, Any]) -> Any:
    """What `encode` was given; its tensors are looked up by name, and left out where there is none."""
    if isinstance(tree, list):
        return [decode(item, f"{name}.{i}", tensors) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if "$" not in tree:
        return {
            key: decode(item, f"{name}.{key}", tensors)
            for key, item in tree.items()
            if not (_is_tensor(item) and f"{name}.{key}" not in tensors)
        }
    kind, *rest = tree["$"]
    if kind == "tensor":
        return tensors.get(name)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(rest[0], name, tensors))
    if kind in _MAPPINGS:
        pairs = [(decode(k, "", {}), decode(v, f"{name}.{k}", tensors)) for k, v in rest[0]]
        return _MAPPINGS[kind](pairs)
    return _SCALARS[kind](*rest)


class Named(dict[str, Any]):
    """For `decode`: has every tensor, and keeps the names that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        self.found.add(name)
        return default


def tensor_problem(tensor: Tensor) -> str | None:
    """Why a tensor can't be kept as plain bytes, if so."""
    if type(tensor) not in TENSORS:
        return f"a tensor of class {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}, quantized or nested"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"load: torch {torch.__version__} has no dtype {name!r}")
    return dtype


def _encode(value: Any, name: str, tensors: dict[str, Tensor], outer: tuple[int, ...]) -> Json:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": ["float", str(value)]}
    if isinstance(value, Tensor):
        if problem := tensor_problem(value):
            raise ValueError(f"save: {name!r} is {problem}, which has no plain bytes")
        if name in tensors:
            raise ValueError(f"save: two tensors are called {name!r}; keys with dots collide")
        tensors[name] = value
        return {"$": ["tensor"]}
    if id(value) in outer:
        raise ValueError(f"save: {name!r} contains itself")
    outer = (*outer, id(value))
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {k: _encode(item, f"{name}.{k}", tensors, outer) for k, item in value.items()}
    if kind in (dict, OrderedDict, Counter):
        keys = [_encode_plain(key, f"a key of {name}", outer) for key in value]
        items = [_encode(v, f"{name}.{k}", tensors, outer) for k, v in zip(keys, value.values())]
        return {"$": [_MAPPING_NAMES[kind], [list(pair) for pair in zip(keys, items)]]}
    if kind is list:
        return [_encode(item, f"{name}.{i}", tensors, outer) for i, item in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {"$": ["tuple", _encode(list(value), name, tensors, outer)]}
    if kind in (set, frozenset):
        # Sorted: two ranks may hold equal sets in another order.
        items = sorted((_encode_plain(item, name, outer) for item in value), key=repr)
        return {"$": [kind.__name__, items]}
    if kind in (bytes, bytearray):
        return {"$": ["bytes", base64.b64encode(value).decode()]}
    if kind is complex:
        return {"$": ["complex", value.real.hex(), value.imag.hex()]}
    if kind is torch.dtype:
        return {"$": ["dtype", dtype_name(value)]}
    if _is_numpy(value):
        data = base64.b64encode(value.tobytes()).decode()
        shape = list(value.shape) if kind.__name__ == "ndarray" else None
        return {"$": ["numpy", value.dtype.str, shape, data]}
    raise ValueError(
        f"save: {name!r} is a {kind.__module__}.{kind.__qualname__}, which would have to be pickled; {FIX}"
    )


def _encode_plain(value: Any, name: str, outer: tuple[int, ...]) -> Json:
    found: dict[str, Tensor] = {}
    tree = _encode(value, name, found, outer)
    if found:
        raise ValueError(f"save: {name!r} has a tensor where only plain values can be; {FIX}")
    return tree


def _is_numpy(value: Any) -> bool:
    """A number or a plain array, of a dtype that its short name says all about."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    try:
        return not value.dtype.hasobject and bool(numpy.dtype(value.dtype.str) == value.dtype)
    except TypeError:
        return False


def _is_tensor(tree: Json) -> bool:
    return isinstance(tree, dict) and tree.get("$") == ["tensor"]


def _numpy(dtype: str, shape: list[int] | None, data: str) -> Any:
    import numpy as np

    array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape).copy()


_MAPPING_NAMES = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, Callable[..., Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "dtype": dtype_of,
    "numpy": _numpy,
}
