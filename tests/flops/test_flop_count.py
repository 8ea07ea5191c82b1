import json

import pytest
import torch
from torch import nn

import ptx
from ptx.flops import FlopCount, Flops, estimate_flops_fake, transformer_flops


def count() -> FlopCount:
    args = ptx.ModelArgs(dim=32, n_layers=12, n_heads=4, vocab_size=50, multiple_of=16)
    return transformer_flops(args, 2, 8, ac="full")


def test_totals():
    part = Flops(1, 20, 300)
    assert (part.total, part.hardware_total) == (21, 321)
    assert part + Flops(1, 1, 1) == Flops(2, 21, 301)


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        count().forward = 3


def test_parts_add_up():
    whole = count()
    for name in ("forward", "backward", "recompute", "total", "hardware_total"):
        want = getattr(whole, name)
        assert getattr(whole.by_module[""], name) == want
        assert sum(getattr(part, name) for part in whole.by_op.values()) == want
        tops = [part for module, part in whole.by_module.items() if module and "." not in module]
        assert sum(getattr(part, name) for part in tops) == want
    children = [whole.by_module[f"layers.{i}"].total for i in range(12)]
    assert sum(children) == whole.by_module["layers"].total


def test_json_round_trip():
    whole = count()
    read = json.loads(whole.to_json())
    assert read == whole.as_dict()
    assert read["total"] == whole.total
    assert read["causal"] == "full"
    assert read["by_module"]["layers.3"]["hardware_total"] == (
        whole.by_module["layers.3"].hardware_total
    )
    assert "\n  " in whole.to_json(indent=2)


def test_table():
    lines = str(count()).splitlines()
    assert lines[0].endswith('causal attention "full"')
    assert lines[1].split() == ["forward", "backward", "recompute", "total", "share"]
    names = [line.split("  ")[0] or line.strip().split("  ")[0] for line in lines[2:]]
    assert names == [
        "all",
        "layers",
        "* (12)",
        "attention",
        "feed_forward",
        "output",
        "op mm",
        "op attention",
    ]
    assert lines[2].endswith("100.0%")
    assert len({len(line) for line in lines[2:]}) == 1  # aligned


def test_table_of_a_model_that_is_a_list():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16)))
    text = str(estimate_flops_fake(model, torch.randn(2, 8)))
    assert "* (2)" in text
