import warnings

import pytest
import torch

from ptx.flops import peak_flops
from ptx.flops._peaks import _CHIPS, _key

TERA = 1e12


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # As drivers spell them
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", None),
        ("NVIDIA H800", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM-64GB", None),  # a custom one with more cores
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA A30", 165),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A40-8Q", None),  # a slice
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI210", 181),
        ("AMD Instinct MI250X", 191.5),  # a die; 383 a card
        ("AMD Instinct MI250X / MI250", None),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI350X", 2306.9),
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Radeon RX 7900 XTX", None),
        ("Intel(R) Data Center GPU Max 1550", 419.4),  # a stack
        ("Intel(R) Data Center GPU Max 1100", 355.5),
        ("GAUDI2", 432),
        ("Gaudi-3", 1835),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("tpu v5e", 197),
        ("TPU v5p", 459),
        ("TPU v6e", 918),
        # As people spell them
        ("h100", 989),
        ("H100 SXM5", 989),
        ("a100", 312),
        ("mi300x", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("a graphics card", None),
    ],
)
def test_P06_dense_peaks_of_exactly_this_chip(name, tflops):
    if tflops is None:
        with pytest.warns(UserWarning, match="isn't in the table; pass the dense peak") as caught:
            assert peak_flops(name) is None
        assert len(caught) == 1
        assert name in str(caught[0].message)
        assert caught[0].filename == __file__
    else:
        assert peak_flops(name) == pytest.approx(tflops * TERA)
        assert peak_flops(name.upper()) == peak_flops(name.lower()) == peak_flops(name)


def test_P06_an_h100_at_480_tflops_is_at_half():
    from ptx.flops import mfu

    peak = peak_flops("NVIDIA H100 80GB HBM3")
    assert mfu(480e12, 1.0, peak, devices=1) == pytest.approx(0.485, abs=5e-4)


def test_dtypes_have_peaks_of_their_own():
    peaks = {
        torch.float32: 67,
        "tf32": 494.5,
        torch.bfloat16: 989,
        torch.float16: 989,
        torch.float8_e4m3fn: 1979,
        torch.float8_e5m2: 1979,
    }
    for dtype, tflops in peaks.items():
        assert peak_flops("NVIDIA H100 80GB HBM3", dtype) == tflops * TERA
    for dtype in (torch.int8, torch.float64, "fp4"):
        with pytest.warns(UserWarning, match="on it isn't in the table"):
            assert peak_flops("NVIDIA H100 PCIe", dtype) is None
    with pytest.warns(UserWarning, match="bfloat16 on it"):  # Volta has no bfloat16
        assert peak_flops("Tesla V100-SXM2-32GB") is None
    assert peak_flops("Tesla V100-SXM2-32GB", torch.float16) == 125 * TERA
    assert peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112 * TERA


def test_peaks_are_dense_and_consistent():
    for name, chip in _CHIPS.items():
        assert _key(name) == name, "a key that no name becomes"
        half = chip.bf16 or chip.fp16
        assert half is not None
        if chip.fp8 is not None:  # twice, at most, which is what a sparse one would be of a dense
            assert 0.99 <= chip.fp8 / half <= 2.03, name
        if chip.tf32 is not None:
            assert 1.9 <= half / chip.tf32 <= 2.1, name
            assert chip.fp32 is not None
            assert chip.fp32 <= chip.tf32, name


def test_a_cpu_has_no_peak_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_flops("cpu") is None
        if not torch.accelerator.is_available():
            assert peak_flops() is None


@pytest.mark.gpu
def test_the_current_accelerator_is_looked_up():
    name = torch.get_device_module().get_device_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peak_flops() == peak_flops(name)
