import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ptx._names import clean_name, clean_named_modules, clean_named_parameters, match_names

NAMES = ["emb", "layers.0.wq", "layers.0.wo", "layers.1.wq", "layers.10.wq", "layers.0.deep.wq"]


def test_wrappers_leave_no_trace_in_names():
    def build():
        return nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))] * 2)})

    plain, wrapped = build(), build()
    wrapped["layers"][0] = checkpoint_wrapper(torch.compile(wrapped["layers"][0]))
    wrapped["layers"][1] = torch.compile(checkpoint_wrapper(wrapped["layers"][1]))
    raw = {name for name, _ in wrapped.named_modules()}
    assert any("_orig_mod" in name for name in raw)
    assert any("_checkpoint_wrapped_module" in name for name in raw)
    assert {n for n, _ in clean_named_modules(wrapped)} >= {n for n, _ in plain.named_modules()}
    assert {n for n, _ in clean_named_parameters(wrapped)} == {
        n for n, _ in plain.named_parameters(remove_duplicate=True)
    }


def test_a_wrapped_module_appears_once_as_its_wrapper():
    model = nn.ModuleDict({"block": checkpoint_wrapper(nn.Linear(2, 2))})
    found = dict(clean_named_modules(model))
    assert list(found) == ["", "block"]
    assert found["block"] is model["block"]


def test_only_whole_components_are_stripped():
    assert clean_name("a._orig_mod_2.b") == "a._orig_mod_2.b"
    assert clean_name("_orig_mod") == ""


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.*.wq", ["layers.0.wq", "layers.1.wq", "layers.10.wq"]),
        ("layers.1*.wq", ["layers.1.wq", "layers.10.wq"]),
        ("layers.0.w?", ["layers.0.wq", "layers.0.wo"]),
        ("layers.[01].wq", ["layers.0.wq", "layers.1.wq"]),
        ("emb", ["emb"]),
        ("layers.*.*.wq", ["layers.0.deep.wq"]),
    ],
)
def test_globs_stay_within_a_component(pattern, found):
    assert match_names(pattern, NAMES, where="test") == found


def test_no_match_names_the_closest():
    with pytest.raises(
        ValueError, match=r"apply_tp: 'layer\.\*\.wq' matches nothing; closest: 'layers\.\*\.wq'"
    ):
        match_names("layer.*.wq", NAMES, where="apply_tp")


def test_no_candidates():
    with pytest.raises(ValueError, match=r"matches nothing$"):
        match_names("x", [], where="apply_tp")
