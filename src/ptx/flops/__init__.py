"""FLOPs of a training step, and how much of the devices' peak it uses."""

from ptx.flops._closed_form import transformer_flops as transformer_flops
from ptx.flops._estimate import estimate_flops_fake as estimate_flops_fake
from ptx.flops._flop_count import FlopCount as FlopCount
from ptx.flops._flop_count import Flops as Flops
from ptx.flops._peaks import peak_flops as peak_flops
from ptx.flops._utilisation import Throughput as Throughput
from ptx.flops._utilisation import hfu as hfu
from ptx.flops._utilisation import mfu as mfu
from ptx.flops._utilisation import step_tokens as step_tokens
from ptx.flops._utilisation import throughput as throughput

__all__ = [
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
]
