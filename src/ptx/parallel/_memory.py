"""How much memory this process uses on one device, now and at its peak."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 2**30
RESET_PEAK = "5"  # what to write to /proc/self/clear_refs; see proc(5)


@dataclass(frozen=True)
class MemoryReport:
    """What `memory_report` returns, in bytes; ``str()`` gives GiB.

    Attributes:
        device: "cuda:0", "cpu", ...
        allocated: In tensors. On CPU: the process's resident memory, torch's own code included.
        peak_allocated: The largest ``allocated`` since the start, or the last reset.
        reserved: What the allocator holds, in tensors or not. On CPU: as ``allocated``.
        peak_reserved: The largest ``reserved``.
    """

    device: str
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int

    def __str__(self) -> str:
        now = f"{self.device} {self.allocated / GIB:.2f} GiB (peak {self.peak_allocated / GIB:.2f}"
        if self.device == "cpu":
            return now + ")"
        reserved = f"reserved {self.reserved / GIB:.2f}, peak {self.peak_reserved / GIB:.2f}"
        return f"{now}; {reserved})"

    def flat(self) -> dict[str, int]:
        """For a log: ``{"train/mem_alloc": ..., ...}``, in bytes."""
        return {
            "train/mem_alloc": self.allocated,
            "train/mem_peak_alloc": self.peak_allocated,
            "train/mem_reserved": self.reserved,
            "train/mem_peak_reserved": self.peak_reserved,
        }


def memory_report(device: torch.device | str, *, reset_peak: bool = False) -> MemoryReport:
    """Bytes that this process uses on ``device``, now and at most so far.

    The numbers are this rank's own: print them on each, or take a maximum over ranks.

    Args:
        device: "cuda", "cuda:1", "cpu", a ``torch.device``, ...; without an index the current one.
        reset_peak: After reading, start the peaks anew from what is used now, to have the next
            report speak of one step alone.

    Returns:
        A `MemoryReport`.

    Raises:
        ValueError: A device that has no memory of its own (meta) or isn't there; or ``reset_peak`` on
            CPU where the system can't do it (it needs Linux).

    Cost: no sync, no communication; some 0.1 ms.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _of_process(reset_peak)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or device.type != accelerator.type:
        there = f"'cpu' and {accelerator.type!r}" if accelerator else "'cpu'"
        raise ValueError(f"memory_report: there is no memory of {str(device)!r}, only of {there}")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    report = MemoryReport(
        f"{device.type}:{index}",
        torch.accelerator.memory_allocated(index),
        torch.accelerator.max_memory_allocated(index),
        torch.accelerator.memory_reserved(index),
        torch.accelerator.max_memory_reserved(index),
    )
    if reset_peak:
        torch.accelerator.reset_peak_memory_stats(index)
    return report


def _of_process(reset_peak: bool) -> MemoryReport:
    status = Path("/proc/self/status")
    if status.exists():
        # "VmRSS:     1234 kB"
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    else:
        import resource  # not on Windows

        # The peak alone is known, in kB, on macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = max(now, peak)  # the kernel counts in batches
    if reset_peak:
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        except OSError as error:
            raise ValueError(
                "memory_report: this system can't reset the peak of CPU memory"
                f" (/proc/self/clear_refs: {error}); leave reset_peak out"
            ) from error
    return MemoryReport("cpu", now, peak, now, peak)
