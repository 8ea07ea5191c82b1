import json
import math
from collections import Counter, OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from ptx.ckpt._encode import decode, encode


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(encode(value, "x", tensors), allow_nan=False))
    return decode(tree, "x", tensors)


VALUES = [
    None,
    True,
    -(2**80),
    0.1 + 0.2,
    -0.0,
    math.inf,
    "\ud800 \x00 é",
    b"\x00\xff",
    1 + 2j,
    (1, (2,), []),
    {"a": {"b": [None]}, "": 0},
    {1: "one", (2, 3): "pair", None: "none", False: "no"},
    {"$": "dollar", "a": 1},
    {3, 1, 2},
    frozenset({"a"}),
    Counter({30: 1, 80: 1}),
    OrderedDict(b=1, a=2),
    torch.bfloat16,
    np.float32(0.1),
    np.int64(2**62),
    np.bool_(True),
    [[]],
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    got = through_json(value)
    assert got == value
    assert type(got) is type(value)
    assert repr(got) == repr(value)  # -0.0, the order of keys, 0 and False


def test_nan_and_arrays() -> None:
    assert math.isnan(through_json([math.nan])[0])
    for array in (np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 2)), np.array(1.5)):
        got = through_json({"a": array})["a"]
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
        assert got.flags.writeable


def test_a_counter_keeps_its_default() -> None:
    assert through_json(Counter({30: 1}))[31] == 0  # MultiStepLR's milestones


def test_tensors_are_set_apart_under_dotted_names() -> None:
    t = torch.ones(2)
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": t, "b": [1, t], 3: (t,), "c": {"d.e": t}}
    tree = encode(value, "top", tensors)
    assert list(tensors) == ["top.a", "top.b.1", "top.3.0", "top.c.d.e"]
    got = decode(json.loads(json.dumps(tree)), "top", tensors)
    assert got == value
    assert all(one is t for one in tensors.values())


class Level(IntEnum):
    LOW = 1


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"f": len}, r"'x\.f' is a builtins\.builtin_function_or_method, which would have to be"),
        ([Level.LOW], r"'x\.0' is a .*Level, which"),
        ({"a": {"b": object()}}, r"'x\.a\.b' is a builtins\.object"),
        ({object(): 1}, r"'a key of x' is a builtins\.object"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"two tensors are called 'x\.a\.b'"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (np.array([object()]), r"numpy\.ndarray"),
        (_itself(), r"'x\.0\.again' contains itself"),
    ],
)
def test_what_would_have_to_be_pickled_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"save: .*{message}"):
        encode(value, "x", {})


def test_tensor_classes_that_are_not_plain_bytes_are_refused() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(ValueError, match="a tensor of class Odd"):
        encode({"a": torch.ones(1).as_subclass(Odd)}, "x", {})
