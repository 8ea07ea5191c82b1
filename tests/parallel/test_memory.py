import dataclasses
import re

import pytest
import torch

from harness import distributed
from ptx.parallel import _memory
from ptx.parallel._memory import MemoryReport, memory_report

MIB = 2**20


@distributed(world_size=1)  # a new process: in this one malloc may have room left from other tests
def test_cpu_memory_and_its_peak():
    before = memory_report("cpu", reset_peak=True)
    # Written to, so that it is resident; above the size from which malloc gives it back at once.
    large = torch.ones(64 * MIB, dtype=torch.uint8)
    during = memory_report(torch.device("cpu"))
    del large
    after = memory_report("cpu", reset_peak=True)
    again = memory_report("cpu")
    assert 60 * MIB < during.allocated - before.allocated < 100 * MIB
    assert after.allocated < during.allocated - 60 * MIB
    assert after.peak_allocated > during.allocated - 4 * MIB  # counted in batches of pages
    assert again.peak_allocated < after.peak_allocated - 60 * MIB
    for report in (before, during, after, again):
        assert report.peak_allocated >= report.allocated > 20 * MIB
        assert (report.reserved, report.peak_reserved) == (report.allocated, report.peak_allocated)


def test_reads_in_gib_and_logs_in_bytes():
    report = MemoryReport("cuda:1", 3 * 2**29, 2**31, 5 * 2**29, 3 * 2**30)
    assert str(report) == "cuda:1 1.50 GiB (peak 2.00; reserved 2.50, peak 3.00)"
    assert str(dataclasses.replace(report, device="cpu")) == "cpu 1.50 GiB (peak 2.00)"
    assert report.flat() == {
        "train/mem_alloc": 3 * 2**29,
        "train/mem_peak_alloc": 2**31,
        "train/mem_reserved": 5 * 2**29,
        "train/mem_peak_reserved": 3 * 2**30,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.allocated = 0


def test_devices_that_are_not_there():
    for device in ("meta", "mtia:0"):
        message = f"memory_report: there is no memory of '{device}', only of 'cpu'"
        with pytest.raises(ValueError, match=re.escape(message)):
            memory_report(device)


def test_a_system_without_proc(monkeypatch):
    monkeypatch.setattr(_memory, "Path", lambda path: Missing())
    report = memory_report("cpu")
    assert report.peak_allocated == report.allocated > 20 * MIB
    with pytest.raises(ValueError, match=r"can't reset the peak of CPU memory .*leave reset_peak"):
        memory_report("cpu", reset_peak=True)


class Missing:
    def exists(self):
        return False

    def write_text(self, text):
        raise FileNotFoundError("no such file")


@pytest.mark.gpu
def test_accelerator():
    before = memory_report("cuda", reset_peak=True)
    large = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    during = memory_report(torch.device("cuda", torch.cuda.current_device()))
    del large
    after = memory_report("cuda", reset_peak=True)
    assert during.device == before.device == f"cuda:{torch.cuda.current_device()}"
    assert during.allocated - before.allocated == 64 * MIB
    assert after.allocated == before.allocated
    assert after.peak_allocated == during.allocated
    assert during.reserved >= during.allocated
    assert memory_report("cuda").peak_allocated == before.allocated
