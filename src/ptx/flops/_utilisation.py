"""Model and hardware FLOPs utilisation, and tokens per second, of a measured step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptx.flops._flop_count import FlopCount, Flops

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mfu(flops: Flops | float, seconds: float, peak: float, *, devices: int) -> float:
    """Model FLOPs utilisation: the model's FLOPs over what the devices could have done.

    It contains no recomputation, so with equal time it is equal for every mesh and with or without
    activation checkpointing. The true ratio is returned; one above 1 warns.

    Args:
        flops: A count of the step (its ``total`` is taken), or a number: of all devices together.
        seconds: That the step took.
        peak: FLOP/s of one device, see `peak_flops`; for the dtype that the matmuls run in.
        devices: How many devices shared these FLOPs: the world size, for the global batch.

    Returns:
        1.0 is the peak.

    Raises:
        ValueError: ``seconds`` or ``peak`` not above 0, ``devices`` below 1, a ``peak`` of None
            (`peak_flops` doesn't know the device: pass a number, or leave MFU out).

    Source: Chowdhery et al. (PaLM), arXiv:2204.02311, appendix B.
    """
    _check("mfu", seconds, peak, devices)
    ratio = _model_flops(flops) / (seconds * peak * devices)
    if ratio > 1:
        _warn("mfu", ratio, flops)
    return ratio


def hfu(flops: Flops | float, seconds: float, peak: float, *, devices: int) -> float:
    """Hardware FLOPs utilisation: as `mfu`, but of the FLOPs with what was recomputed.

    Args:
        flops: A count (its ``hardware_total`` is taken), or a number.
        seconds: As for `mfu`.
        peak: As for `mfu`.
        devices: As for `mfu`.

    Returns:
        1.0 is the peak.

    Raises:
        ValueError: As `mfu`.

    Source: Korthikanti et al., arXiv:2205.05198, section 6.
    """
    _check("hfu", seconds, peak, devices)
    ratio = _executed_flops(flops) / (seconds * peak * devices)
    if ratio > 1:
        _warn("hfu", ratio, flops)
    return ratio


def step_tokens(batch: int, seq: int, mesh: DeviceMesh) -> int:
    """Tokens of a step over all ranks, each counted once.

    Ranks of a tp or cp group share their samples, and pipeline stages pass them on, so what counts
    is the data ranks: dp_replicate x dp_shard.

    Args:
        batch: Samples that a data rank takes per step, all micro-batches together.
        seq: Tokens of a whole sample, before context parallelism splits it. Padding counts.
        mesh: The mesh of `build_mesh`.

    Returns:
        batch x seq x data ranks.
    """
    from ptx.mesh import data_mesh

    return batch * seq * data_mesh(mesh).size()


@dataclass(frozen=True)
class Throughput:
    """What `throughput` returns.

    Attributes:
        tflops: Model FLOPs per second and device, in 10**12.
        tps: Tokens per second of all devices.
        tps_per_gpu: Of each device.
        mfu: See `mfu`; None without a peak.
        hfu: See `hfu`; None without a peak.
    """

    tflops: float
    tps: float
    tps_per_gpu: float
    mfu: float | None
    hfu: float | None

    def flat(self) -> dict[str, float]:
        """For a log: ``{"train/tflops": ..., "train/mfu": ...}``, without what isn't known."""
        return {f"train/{name}": value for name, value in vars(self).items() if value is not None}


def throughput(
    flops: Flops | float,
    tokens: int,
    seconds: float,
    *,
    devices: int,
    peak: float | None = None,
) -> Throughput:
    """The speed of a step in tokens and in FLOPs.

    Args:
        flops: Of the step, as for `mfu`.
        tokens: Of the step over all ranks, see `step_tokens`.
        seconds: That the step took.
        devices: How many devices shared the step.
        peak: FLOP/s of one device; None leaves ``mfu`` and ``hfu`` out.

    Raises:
        ValueError: As `mfu`.
    """
    _check("throughput", seconds, 1.0 if peak is None else peak, devices)
    ratios: list[float | None] = [None, None]
    if peak is not None:
        at_peak = seconds * peak * devices
        ratios = [_model_flops(flops) / at_peak, _executed_flops(flops) / at_peak]
        for name, ratio in zip(("mfu", "hfu"), ratios):
            if ratio is not None and ratio > 1:
                _warn(name, ratio, flops)
                break  # one is enough
    return Throughput(
        tflops=_model_flops(flops) / seconds / devices / 1e12,
        tps=tokens / seconds,
        tps_per_gpu=tokens / seconds / devices,
        mfu=ratios[0],
        hfu=ratios[1],
    )


def _model_flops(flops: Flops | float) -> float:
    return flops.total if isinstance(flops, Flops) else flops


def _executed_flops(flops: Flops | float) -> float:
    return flops.hardware_total if isinstance(flops, Flops) else flops


def _warn(name: str, ratio: float, flops: Flops | float) -> None:
    counted = f'; it was counted as "{flops.causal}"' if isinstance(flops, FlopCount) else ""
    warnings.warn(
        f"{name}: {ratio:.3f} is above 1: too many FLOPs (kernels skip the masked half of causal"
        f' attention, which causal="half" leaves out{counted}), too low a peak (of another dtype?),'
        " too few devices, or too short a time (of an accelerator that wasn't waited for)",
        stacklevel=3,
    )


def _check(where: str, seconds: float, peak: float | None, devices: int) -> None:
    wrong = []
    if not seconds > 0:
        wrong.append(f"seconds must be above 0, got {seconds!r}")
    if peak is None:
        wrong.append("peak is None: pass the device's FLOP/s, or leave this metric out")
    elif not peak > 0:
        wrong.append(f"peak must be above 0 FLOP/s, got {peak!r}")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        wrong.append(f"devices must be an int from 1, got {devices!r}")
    if wrong:
        raise ValueError(f"{where}: " + "; ".join(wrong))
