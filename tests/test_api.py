"""The public names are a promise: changing them is a decision, made here."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ptx

PUBLIC = {
    "ptx.ckpt": ["AsyncCheckpointer", "PerRank", "train_state", "verify"],
    "ptx.flops": [
        "FlopCount",
        "Flops",
        "Throughput",
        "estimate_flops_fake",
        "hfu",
        "mfu",
        "peak_flops",
        "step_tokens",
        "throughput",
        "transformer_flops",
    ],
    "ptx.hf": [
        "HfReport",
        "HfTokenizer",
        "convert_interleaved",
        "half_split_rows",
        "hf_folder",
        "hf_report",
        "interleaved_rows",
        "load_hf",
        "load_tokenizer",
        "save_hf",
    ],
    "ptx.loss": [
        "chunked_ce",
        "cross_entropy",
        "fused_linear_ce",
        "token_logprobs",
        "token_mean",
        "token_scale",
        "vocab_parallel_ce",
    ],
    "ptx.mesh": ["build_mesh", "data_mesh", "fsdp_mesh", "loss_mesh", "seed_ranks"],
    "ptx.model": [
        "LinearScaling",
        "Llama3Scaling",
        "ModelArgs",
        "RopeScaling",
        "Transformer",
        "preset",
    ],
    "ptx.parallel": [
        "HeadParallel",
        "Replicated",
        "accumulate_grads",
        "apply_ac",
        "apply_compile",
        "apply_fsdp2",
        "apply_tp",
        "assert_replicas_equal",
        "clip_grad_norm_",
        "find_blocks",
        "materialize",
        "memory_report",
        "model_stats",
        "tp_plan",
    ],
}
# In their modules only: a union for annotations, and styles for plans of one's own.
NOT_AT_THE_DOOR = {
    "Flops",
    "HeadParallel",
    "HfReport",
    "HfTokenizer",
    "Replicated",
    "RopeScaling",
    "Throughput",
    "half_split_rows",
    "interleaved_rows",
    "verify",
}
FRONT_DOOR = sorted(
    name for names in PUBLIC.values() for name in names if name not in NOT_AT_THE_DOOR
)


def test_front_door_is_pinned():
    assert sorted(ptx.__all__) == FRONT_DOOR


@pytest.mark.parametrize("module", PUBLIC)
def test_module_exports_are_pinned(module):
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]


@pytest.mark.parametrize("name", FRONT_DOOR)
def test_every_name_resolves_to_a_documented_object(name):
    thing = getattr(ptx, name)
    assert thing is getattr(ptx, name)
    assert thing.__doc__
    assert name in dir(ptx)


def test_parts_are_attributes():
    code = "import ptx; assert ptx.parallel.Replicated and ptx.ckpt.verify and ptx.hf.load_hf"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match="no attribute 'aply_tp'"):
        ptx.aply_tp  # noqa: B018


def test_type_checkers_see_what_the_front_door_resolves():
    source = Path(ptx.__file__).read_text()
    block = source[source.index("if TYPE_CHECKING:") : source.index("_HOME")]
    for module, names in PUBLIC.items():
        for name in set(names) - NOT_AT_THE_DOOR:
            assert f"from {module} import {name} as {name}" in block


def test_import_ptx_imports_none_of_its_parts():
    code = (
        "import sys, ptx; print([m for m in sys.modules if m.startswith('ptx.') or m == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
