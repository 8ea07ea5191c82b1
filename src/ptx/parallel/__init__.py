"""Wrap a model in place for parallel training, one function per concern."""

from ptx.parallel._blocks import find_blocks as find_blocks
from ptx.parallel._clip import clip_grad_norm_ as clip_grad_norm_
from ptx.parallel._fsdp2 import apply_fsdp2 as apply_fsdp2
from ptx.parallel._materialize import materialize as materialize
from ptx.parallel._tp import apply_tp as apply_tp
from ptx.parallel._tp_plan import tp_plan as tp_plan
from ptx.parallel._tp_styles import HeadParallel as HeadParallel
from ptx.parallel._tp_styles import Replicated as Replicated

__all__ = [
    "HeadParallel",
    "Replicated",
    "apply_fsdp2",
    "apply_tp",
    "clip_grad_norm_",
    "find_blocks",
    "materialize",
    "tp_plan",
]
