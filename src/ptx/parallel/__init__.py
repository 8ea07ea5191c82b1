"""Wrap a model in place for parallel training, one function per concern."""

from ptx.parallel._ac import apply_ac as apply_ac
from ptx.parallel._accumulate import accumulate_grads as accumulate_grads
from ptx.parallel._blocks import find_blocks as find_blocks
from ptx.parallel._clip import clip_grad_norm_ as clip_grad_norm_
from ptx.parallel._compile import apply_compile as apply_compile
from ptx.parallel._fsdp2 import apply_fsdp2 as apply_fsdp2
from ptx.parallel._materialize import materialize as materialize
from ptx.parallel._memory import memory_report as memory_report
from ptx.parallel._replicas import assert_replicas_equal as assert_replicas_equal
from ptx.parallel._stats import model_stats as model_stats
from ptx.parallel._tp import apply_tp as apply_tp
from ptx.parallel._tp_plan import tp_plan as tp_plan
from ptx.parallel._tp_styles import HeadParallel as HeadParallel
from ptx.parallel._tp_styles import Replicated as Replicated

__all__ = [
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
]
