"""Peak FLOP/s of devices: dense, per device as torch counts devices, each from its vendor's sheet."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

T = 1e12


def peak_flops(
    device_name: str | None = None, dtype: torch.dtype | Literal["tf32"] = torch.bfloat16
) -> float | None:
    """The dense peak of one device for matrix products in ``dtype``, as its vendor states it.

    Without 2:4 sparsity, which vendors' headline numbers include; with accumulation in float32; at
    the boost clock. A device is what torch calls one: of an MI250X one of its two dies, of an Intel
    Max 1550 one of its two stacks.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` gives it, or shorter ("H100", "A100 PCIe");
            case doesn't matter. None: the current accelerator.
        dtype: Of the operands. ``torch.float32`` is full precision: TF32 has a peak of its own,
            "tf32", for when ``torch.set_float32_matmul_precision`` allows it. All float8 dtypes are one.

    Returns:
        FLOP/s; None on a CPU, and, with a warning, for a device or dtype that isn't in the table.
        Never a similar device's: slices (MIG), laptop and other variants have peaks of their own.
    """
    if device_name is None:
        device_name = _current_device()
        if device_name is None:
            return None
    if device_name.strip().lower() == "cpu":
        return None
    kind = _KINDS.get(dtype)
    chip = _CHIPS.get(_key(device_name))
    peak = None if chip is None or kind is None else getattr(chip, kind)
    if peak is None:
        what = "the device" if chip is None else f"{dtype} on it"
        warnings.warn(
            f"peak_flops: {device_name!r}: {what} isn't in the table; pass the dense peak of its"
            " datasheet to mfu as a number",
            stacklevel=2,
        )
        return None
    return float(peak) * T


def _current_device() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    if not hasattr(module, "get_device_name"):
        return accelerator.type
    return str(module.get_device_name(torch.accelerator.current_device_index()))


def _key(name: str) -> str:
    """What tells chips apart: "NVIDIA A100-SXM4-80GB" -> "a100 sxm"; unknown words stay."""
    words = re.sub(r"\((r|tm)\)|[®™]", " ", name.lower())
    words = re.sub(r"(?<=sxm)\d", "", words)
    words = re.sub(r"gaudi-?(?=\d)", "gaudi", words)
    return " ".join(w for w in re.split(r"[^a-z0-9]+", words) if w and not _NOISE.fullmatch(w))


# Vendors, families, memory. Not 64gb: an A100 of that size has more cores than the others.
_NOISE = re.compile(
    r"nvidia|amd|intel|google|habana|tesla|geforce|instinct|data|center|oam|ac|generation"
    r"|hbm\de?|(16|24|32|40|48|80|94|96|120|141|144|180|192|256|268|288|480)gb?"
)

_KINDS: dict[torch.dtype | str, str] = {
    torch.float32: "fp32",
    "tf32": "tf32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **{
        getattr(torch, name): "fp8"
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}


@dataclass(frozen=True)
class _Chip:
    """Dense TFLOP/s; None: not supported, or not stated."""

    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None = None


def _tensor(fp32: float, tf32: float, half: float, fp8: float | None = None) -> _Chip:
    return _Chip(fp32, tf32, half, half, fp8)


_H100 = _tensor(67, 494.5, 989, 1979)
_A100 = _tensor(19.5, 156, 312)
_MI300X = _tensor(163.4, 653.7, 1307.4, 2614.9)
_GAUDI3 = _Chip(None, None, 1835, None, 1835)

_CHIPS: dict[str, _Chip] = {
    # NVIDIA V100 datasheet, V100S datasheet, T4 datasheet: tensor cores take float16 only.
    "v100 sxm": _Chip(15.7, None, None, 125),
    "v100 pcie": _Chip(14, None, None, 112),
    "v100s pcie": _Chip(16.4, None, None, 130),
    "t4": _Chip(8.1, None, None, 65),
    # NVIDIA A100 datasheet; the A800 is an A100 with less NVLink.
    "a100": _A100,
    "a100 sxm": _A100,
    "a100 pcie": _A100,
    "a800 sxm": _A100,
    "a800 pcie": _A100,
    # Datasheets of A30, A10, A40, RTX A6000. An A10G (AWS) isn't an A10.
    "a30": _tensor(10.3, 82, 165),
    "a10": _tensor(31.2, 62.5, 125),
    "a40": _tensor(37.4, 74.8, 149.7),
    "rtx a6000": _tensor(38.7, 77.4, 154.8),
    # NVIDIA H100 datasheet (halved: it states sparse numbers), columns SXM, PCIe, NVL.
    "h100": _H100,
    "h100 sxm": _H100,
    "h800": _H100,
    "h800 sxm": _H100,
    "h100 pcie": _tensor(51, 378, 756, 1513),
    "h100 nvl": _tensor(60, 417.5, 835, 1671),
    # NVIDIA H200 datasheet (halved), columns SXM, NVL; GH200 datasheet; H20 product brief.
    "h200": _H100,
    "h200 sxm": _H100,
    "h200 nvl": _tensor(60, 417.5, 835, 1671),
    "gh200": _H100,
    "h20": _tensor(44, 74, 148, 296),
    # NVIDIA HGX B200 and B300 datasheets (an eighth, halved), GB200 and GB300 NVL72 (a 72nd, halved).
    "b100": _tensor(60, 875, 1750, 3500),
    "b200": _tensor(75, 1125, 2250, 4500),
    "gb200": _tensor(80, 1250, 2500, 5000),
    "b300": _tensor(75, 1125, 2250, 4500),
    "b300 sxm": _tensor(75, 1125, 2250, 4500),
    "gb300": _tensor(80, 1250, 2500, 5000),
    # Datasheets of L4, L40, L40S (halved where sparse); RTX 6000 Ada datasheet.
    "l4": _tensor(30.3, 60, 121, 242.5),
    "l40": _tensor(90.5, 90.5, 181, 362),
    "l40s": _tensor(91.6, 183, 362, 733),
    "rtx 6000 ada": _tensor(91.1, 182.1, 364.2, 728.5),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture whitepapers, FP32 accumulation.
    "rtx 3090": _tensor(35.6, 35.6, 71),
    "rtx 4090": _tensor(82.6, 82.6, 165.2, 330.3),
    "rtx 5090": _tensor(104.8, 104.8, 209.5, 419),
    # AMD Instinct datasheets, matrix rates. MI250(X): a card is two devices.
    "mi100": _Chip(46.1, None, 92.3, 184.6),
    "mi210": _Chip(45.3, None, 181, 181),
    "mi250": _Chip(45.3, None, 181.05, 181.05),
    "mi250x": _Chip(47.9, None, 191.5, 191.5),
    "mi300a": _tensor(122.6, 490.3, 980.6, 1961.2),
    "mi300x": _MI300X,
    "mi325x": _MI300X,
    "mi350x": _Chip(144.2, None, 2306.9, 2306.9, 4613.7),
    "mi355x": _Chip(157.3, None, 2516.6, 2516.6, 5033.2),
    # Intel Data Center GPU Max product brief, XMX rates, float32 on vector engines. A 1550 is two
    # devices (ZE_FLAT_DEVICE_HIERARCHY=FLAT, the default); Gaudi 2 and 3 white papers.
    "gpu max 1550": _Chip(26.2, 209.7, 419.4, 419.4),
    "gpu max 1100": _Chip(22.2, 177.7, 355.5, 355.5),
    "gaudi2": _Chip(None, None, 432, None, 865),
    "gaudi3": _GAUDI3,
    # Google Cloud TPU documentation, per chip.
    "tpu v2": _Chip(None, None, 45, None),
    "tpu v3": _Chip(None, None, 123, None),
    "tpu v4": _Chip(None, None, 275, None),
    "tpu v5e": _Chip(None, None, 197, None),
    "tpu v5 lite": _Chip(None, None, 197, None),
    "tpu v5p": _Chip(None, None, 459, None),
    "tpu v6e": _Chip(None, None, 918, None),
    "tpu v6 lite": _Chip(None, None, 918, None),
    "tpu7x": _Chip(None, None, 2307, None, 4614),
}
