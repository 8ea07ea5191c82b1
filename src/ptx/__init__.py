"""Composable parallelism primitives for PyTorch; see README.md.

Names are resolved on first use (PEP 562): ``torch.distributed``'s parts cost most of a second to import, and a script
that only needs a loss should not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx.ckpt import AsyncCheckpointer as AsyncCheckpointer
    from ptx.ckpt import PerRank as PerRank
    from ptx.ckpt import train_state as train_state
    from ptx.flops import FlopCount as FlopCount
    from ptx.flops import estimate_flops_fake as estimate_flops_fake
    from ptx.flops import hfu as hfu
    from ptx.flops import mfu as mfu
    from ptx.flops import peak_flops as peak_flops
    from ptx.flops import step_tokens as step_tokens
    from ptx.flops import throughput as throughput
    from ptx.flops import transformer_flops as transformer_flops
    from ptx.hf import convert_interleaved as convert_interleaved
    from ptx.hf import hf_folder as hf_folder
    from ptx.hf import hf_report as hf_report
    from ptx.hf import load_hf as load_hf
    from ptx.hf import load_tokenizer as load_tokenizer
    from ptx.hf import save_hf as save_hf
    from ptx.loss import chunked_ce as chunked_ce
    from ptx.loss import cross_entropy as cross_entropy
    from ptx.loss import fused_linear_ce as fused_linear_ce
    from ptx.loss import token_logprobs as token_logprobs
    from ptx.loss import token_mean as token_mean
    from ptx.loss import token_scale as token_scale
    from ptx.loss import vocab_parallel_ce as vocab_parallel_ce
    from ptx.mesh import build_mesh as build_mesh
    from ptx.mesh import data_mesh as data_mesh
    from ptx.mesh import fsdp_mesh as fsdp_mesh
    from ptx.mesh import loss_mesh as loss_mesh
    from ptx.mesh import seed_ranks as seed_ranks
    from ptx.model import LinearScaling as LinearScaling
    from ptx.model import Llama3Scaling as Llama3Scaling
    from ptx.model import ModelArgs as ModelArgs
    from ptx.model import Transformer as Transformer
    from ptx.model import preset as preset
    from ptx.parallel import accumulate_grads as accumulate_grads
    from ptx.parallel import apply_ac as apply_ac
    from ptx.parallel import apply_compile as apply_compile
    from ptx.parallel import apply_fsdp2 as apply_fsdp2
    from ptx.parallel import apply_tp as apply_tp
    from ptx.parallel import assert_replicas_equal as assert_replicas_equal
    from ptx.parallel import clip_grad_norm_ as clip_grad_norm_
    from ptx.parallel import find_blocks as find_blocks
    from ptx.parallel import materialize as materialize
    from ptx.parallel import memory_report as memory_report
    from ptx.parallel import model_stats as model_stats
    from ptx.parallel import tp_plan as tp_plan

_HOME = {
    "ptx.ckpt": (
        "AsyncCheckpointer",
        "PerRank",
        "train_state",
    ),
    "ptx.flops": (
        "FlopCount",
        "estimate_flops_fake",
        "hfu",
        "mfu",
        "peak_flops",
        "step_tokens",
        "throughput",
        "transformer_flops",
    ),
    "ptx.hf": (
        "convert_interleaved",
        "hf_folder",
        "hf_report",
        "load_hf",
        "load_tokenizer",
        "save_hf",
    ),
    "ptx.loss": (
        "chunked_ce",
        "cross_entropy",
        "fused_linear_ce",
        "token_logprobs",
        "token_mean",
        "token_scale",
        "vocab_parallel_ce",
    ),
    "ptx.mesh": (
        "build_mesh",
        "data_mesh",
        "fsdp_mesh",
        "loss_mesh",
        "seed_ranks",
    ),
    "ptx.model": (
        "LinearScaling",
        "Llama3Scaling",
        "ModelArgs",
        "Transformer",
        "preset",
    ),
    "ptx.parallel": (
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
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if f"ptx.{name}" in _HOME:
        return import_module(f"ptx.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ptx' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
