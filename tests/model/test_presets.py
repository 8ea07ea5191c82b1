import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ptx.model import Llama3Scaling, ModelArgs, Transformer, preset

# Billions of parameters, counted; Llama's are the published 8.03, 70.6 and 405.9.
COUNTED = {
    "debug": 0.009,
    "s": 0.125,
    "m": 0.246,
    "l": 0.495,
    "xl": 1.21,
    "xxl": 5.93,
    "xxxl": 11.34,
    "agpt-2b": 1.99,
    "agpt-20b": 20.74,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
}


def count(args: ModelArgs) -> int:
    # Blocks are alike: two models of few layers give the count of any number.
    sizes = []
    for n_layers in (1, 2):
        with torch.device("meta"):
            model = Transformer(replace(args, n_layers=n_layers))
        sizes.append(sum(p.numel() for p in model.parameters()))
    return sizes[0] + (args.n_layers - 1) * (sizes[1] - sizes[0])


@pytest.mark.parametrize("name", COUNTED)
def test_counted_parameters(name):
    digits = 2 if COUNTED[name] > 1 else 3
    assert round(count(preset(name)) / 1e9, digits) == COUNTED[name]


def test_docs_table_lists_every_preset_with_its_count():
    page = Path(__file__).parents[2] / "docs" / "model.md"
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([\d,]+) \|$", page.read_text(), re.MULTILINE)
    assert {name: int(number.replace(",", "")) for name, number in rows} == {
        name: count(preset(name)) for name in COUNTED
    }


def test_whole_model_on_meta_has_the_extrapolated_count():
    with torch.device("meta"):
        model = Transformer(preset("xl"))
    assert sum(p.numel() for p in model.parameters()) == count(preset("xl"))


def test_public_llama_shapes():
    small, large, largest = (preset(f"llama3-{size}") for size in ("8b", "70b", "405b"))
    assert [a.ffn_width for a in (small, large, largest)] == [14336, 28672, 53248]
    assert {a.head_width for a in (small, large, largest)} == {128}
    assert {a.kv_heads for a in (small, large, largest)} == {8}
    assert {a.rope_theta for a in (small, large, largest)} == {5e5}
    assert {a.norm_eps for a in (small, large, largest)} == {1e-5}
    assert small.rope_scaling is None
    assert largest.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_agpt_switches():
    assert (preset("agpt-2b").ffn_width, preset("agpt-2b").rope_theta) == (11008, 5e4)
    assert (preset("agpt-20b").ffn_width, preset("agpt-20b").rope_theta) == (14336, 5e5)
    assert preset("agpt-20b").vocab_size == 256128


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("small", "s"),
        ("medium", "m"),
        ("large", "l"),
        ("xlarge", "xl"),
        ("extra-large", "xl"),
        ("Extra_Large", "xl"),
        ("xxlarge", "xxl"),
        ("xxxlarge", "xxxl"),
        ("agpt2b", "agpt-2b"),
        ("agpt_2b", "agpt-2b"),
        ("agpt20b", "agpt-20b"),
        ("llama3_8b", "llama3-8b"),
        ("llama-3-8b", "llama3-8b"),
    ],
)
def test_aliases(alias, name):
    assert preset(alias) == preset(name)


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="preset: 'gpt' is unknown") as error:
        preset("gpt")
    for choice in (*COUNTED, "extra-large = xl"):
        assert choice in str(error.value)
