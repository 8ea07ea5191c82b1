import warnings

import pytest
import torch

import ptx
from harness import distributed
from ptx.flops import (
    FlopCount,
    Flops,
    estimate_flops_fake,
    hfu,
    mfu,
    step_tokens,
    throughput,
    transformer_flops,
)

COUNT = FlopCount(100, 200, 60, "full")


def test_mfu_is_of_the_model_and_hfu_of_what_ran():
    assert mfu(COUNT, 2.0, 50.0, devices=4) == 300 / 400
    assert hfu(COUNT, 2.0, 50.0, devices=4) == 360 / 400
    assert mfu(300, 2.0, 50.0, devices=4) == 0.75
    assert hfu(Flops(100, 200, 60), 2.0, 50.0, devices=4) == 0.9


def test_a_ratio_above_one_is_true_and_warns_once():
    with pytest.warns(UserWarning, match=r'mfu: 1.500 is above 1.*counted as "full"') as caught:
        assert mfu(COUNT, 1.0, 50.0, devices=4) == 1.5
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="hfu: 1.800 is above 1") as caught:
        assert hfu(COUNT, 1.0, 50.0, devices=4) == 1.8
    assert caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own rule: once for a place in the code
        for _ in range(3):
            mfu(COUNT, 1.0, 50.0, devices=4)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="mfu: 1.500") as caught:
        throughput(COUNT, 10, 1.0, devices=4, peak=50.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="hfu: 1.059"):
        throughput(COUNT, 10, 1.0, devices=4, peak=85.0)


@pytest.mark.parametrize(
    ("seconds", "peak", "devices", "message"),
    [
        (0.0, 1.0, 1, "seconds must be above 0, got 0.0"),
        (float("nan"), 1.0, 1, "seconds must be above 0, got nan"),
        (-1.0, 1.0, 1, "seconds must be above 0"),
        (1.0, None, 1, "peak is None: pass the device's FLOP/s, or leave this metric out"),
        (1.0, 0.0, 1, "peak must be above 0"),
        (1.0, 1.0, 0, "devices must be an int from 1, got 0"),
        (1.0, 1.0, 2.0, "devices must be an int from 1, got 2.0"),
    ],
)
def test_bad_input_is_refused(seconds, peak, devices, message):
    for fn in (mfu, hfu):
        with pytest.raises(ValueError, match=f"{fn.__name__}: .*{message}"):
            fn(COUNT, seconds, peak, devices=devices)
    if peak is not None:
        with pytest.raises(ValueError, match=message):
            throughput(COUNT, 10, seconds, devices=devices, peak=peak)


def test_throughput():
    got = throughput(COUNT, 4096, 2.0, devices=8, peak=50.0)
    assert (got.tps, got.tps_per_gpu) == (2048.0, 256.0)
    assert got.tflops == 300 / 2 / 8 / 1e12
    assert (got.mfu, got.hfu) == (300 / 800, 360 / 800)
    assert set(got.flat()) == {
        "train/tflops",
        "train/tps",
        "train/tps_per_gpu",
        "train/mfu",
        "train/hfu",
    }
    without = throughput(COUNT, 4096, 2.0, devices=8)
    assert without.mfu is without.hfu is None
    assert set(without.flat()) == {"train/tflops", "train/tps", "train/tps_per_gpu"}


@distributed(world_size=8)
def test_P08_tokens_count_once():
    for sizes, tokens in [
        ({"tp": 2}, 4096),  # dp 4; 8192 if every rank's were summed
        ({"tp": 2, "dp_replicate": 2}, 4096),
        ({"tp": 1}, 8192),
        ({"cp": 2}, 4096),
        ({"cp": 2, "tp": 2}, 2048),
        ({"pp": 2, "tp": 2}, 2048),
        ({"tp": 8}, 1024),
    ]:
        mesh = ptx.build_mesh(**sizes, device_type="cpu")
        assert step_tokens(1, 1024, mesh) == tokens
        assert step_tokens(3, 1024, mesh) == 3 * tokens
    got = throughput(COUNT, 4096, 1.0, devices=8)
    assert got.tps_per_gpu == 512


def test_P08_mfu_of_equal_work_and_time_is_equal():
    args = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=50, multiple_of=16)
    # 8 devices, a global batch of 8: as 8 data ranks, as 4 with tp 2, accumulated in 2
    whole = transformer_flops(args, 8, 16)
    parts = [transformer_flops(args, 4, 16), transformer_flops(args, 4, 16)]
    assert sum(part.total for part in parts) == whole.total
    got = {mfu(count, 1.0, 1e12, devices=8) for count in (whole, parts[0] + parts[1])}
    assert len(got) == 1


def test_recomputation_changes_hfu_only():
    args = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=50, multiple_of=16)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    counts = []
    for ac in ("none", "selective", "full"):
        model = ptx.Transformer(args)
        counts.append(
            estimate_flops_fake(model if ac == "none" else ptx.apply_ac(model, ac), tokens)
        )
    assert len({mfu(count, 1.0, 1e12, devices=1) for count in counts}) == 1
    rates = [hfu(count, 1.0, 1e12, devices=1) for count in counts]
    assert rates == sorted(set(rates))
