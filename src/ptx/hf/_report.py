"""What a checkpoint has for a model, and what is wrong with it, before anything is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ptx.hf._folder import Source, open_source
from ptx.hf._names import is_no_weight, keys_of_whole
from ptx.hf._ranks import Ranks
from ptx.hf._read import Reader, bytes_to_read
from ptx.hf._safetensors import Entry
from ptx.hf._targets import Target, misplaced, targets_of

_SHOWN = 20  # names in one line of an error


@dataclass
class HfReport:
    """What `load_hf` would do.

    Args:
        path: The folder or file.
        missing: Keys that a tensor of the model, on any rank, needs and the file lacks.
        unexpected: Keys in the file that no rank's part of the model takes.
        misshapen: Tensors with another shape or kind of dtype than the model's.
        other: What else is wrong.
        ignored: Keys passed over: tables in old files, and a tied head that equals the embedding.
        padded: Tensors of which the file has fewer rows; the rest becomes zero.
        dtypes: Elements on file by dtype.
        bytes_to_read: Bytes that this rank reads.
    """

    path: Path
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    dtypes: dict[str, int] = field(default_factory=dict)
    bytes_to_read: int = 0

    @property
    def problems(self) -> list[str]:
        """One line for each kind of thing that is wrong; empty: it can be loaded."""
        lines = [
            f"{len(names)} {what}: {_listed(names)}"
            for names, what in (
                (self.missing, "missing in the file"),
                (self.unexpected, "in the file that the model doesn't have"),
                (self.misshapen, "don't fit"),
            )
            if names
        ]
        return lines + self.other

    def __str__(self) -> str:
        """Several lines of text."""
        dtypes = ", ".join(f"{count:,} {name}" for name, count in self.dtypes.items())
        lines = [f"{self.path}: {dtypes}; {self.bytes_to_read:,} bytes for this rank"]
        for names, what in ((self.padded, "padded with zeros"), (self.ignored, "passed over")):
            if names:
                lines.append(f"{what}: {_listed(names)}")
        return "\n".join(lines + self.problems)


@dataclass(frozen=True)
class Job:
    """One tensor to read: what is on file, and where it goes."""

    entry: Entry
    target: Target


def compare(
    parts: list[nn.Module], path: Path, vocab_size: int | None, ranks: Ranks, where: str
) -> tuple[HfReport, list[Job]]:
    """Compare a model with a file, on all ranks; the report is the same on each but for bytes.

    Raises:
        ValueError: On every rank, if one can't read the file.
    """
    report, jobs, source, problems = HfReport(path), [], None, []
    try:
        targets = [targets_of(part) for part in parts]
        source = open_source(path)
        jobs = _match(parts, targets, source, vocab_size, report)
        problems = [line for part_targets in targets for line in misplaced(part_targets)]
    except (OSError, ValueError) as error:
        problems = [str(error)]
    everyone = ranks.gather((problems, source and source.fingerprint(), report))
    ranks.raise_found(where, [lines for lines, _, _ in everyone])
    reports = [theirs for _, _, theirs in everyone]
    # A rank that has a part of the model misses in it what others have.
    left_by_all = set(report.unexpected).intersection(*(r.unexpected for r in reports))
    report.unexpected = [key for key in report.unexpected if key in left_by_all]
    report.missing = _union([r.missing for r in reports])
    report.misshapen = _union([r.misshapen for r in reports])
    report.other = _union([r.other for r in reports])
    if len({fingerprint for _, fingerprint, _ in everyone}) > 1:
        report.other.append(f"{path} holds other tensors for some ranks than for others")
    return report, jobs


def _match(
    parts: list[nn.Module],
    targets: list[list[Target]],
    source: Source,
    vocab_size: int | None,
    report: HfReport,
) -> list[Job]:
    jobs, used = [], set[str]()
    for part, part_targets in zip(parts, targets, strict=True):
        used |= keys_of_whole(part)
        for target in part_targets:
            found = [key for key in target.keys if key in source.entries]
            used.update(found)
            if not found:
                report.missing.append(_missing(target, source))
                continue
            entry = source.entries[found[0]]
            if problem := _misfit(target, entry, vocab_size):
                report.misshapen.append(problem)
                continue
            if entry.shape != tuple(target.tensor.shape):
                report.padded.append(entry.key)
            jobs.append(Job(entry, target))
            for key in found[1:]:
                _check_duplicate(target, entry, source.entries[key], report)
    left = [key for key in source.entries if key not in used]
    passed = {key for key in left if any(is_no_weight(p, key, source.entries) for p in parts)}
    report.ignored += sorted(passed)
    report.unexpected = [key for key in left if key not in passed]
    report.dtypes = _dtypes(source)
    report.bytes_to_read = sum(bytes_to_read(job.entry, job.target.tensor) for job in jobs)
    if quantised := source.config.get("quantization_config"):
        report.other.append(f"quantization_config={quantised!r}; dequantise the model first")
    return jobs


def _missing(target: Target, source: Source) -> str:
    key = target.keys[0]
    if target.is_vocabulary and source.config.get("tie_word_embeddings"):
        return f"{key} (the file ties it to the embedding: tie the model's too)"
    return key


def _misfit(target: Target, entry: Entry, vocab_size: int | None) -> str | None:
    want, have = tuple(target.tensor.shape), entry.shape
    if vocab_size is not None and target.is_vocabulary and want:
        if have != (vocab_size, *want[1:]) or want[0] < vocab_size:
            return (
                f"{entry.key} is {list(have)} in the file, {list(want)} in the model, and"
                f" vocab_size={vocab_size}"
            )
    elif want != have:
        hint = ""
        if target.is_vocabulary and want[1:] == have[1:] and want[0] > have[0]:
            hint = f"; vocab_size={have[0]} takes the rest for padding"
        return f"{entry.key} is {list(have)} in the file, {list(want)} in the model{hint}"
    dtype = target.tensor.dtype
    if dtype == entry.dtype:
        return None
    scaled = entry.dtype.itemsize == 1  # float8: without its scales it isn't the weight
    if not (dtype.is_floating_point and entry.dtype.is_floating_point) or scaled:
        return f"{entry.key} is {entry.dtype} in the file, {dtype} in the model"
    return None


def _check_duplicate(target: Target, entry: Entry, other: Entry, report: HfReport) -> None:
    with Reader() as reader:
        same = entry.shape == other.shape and reader.are_equal(entry, other, target.tensor)
    if same:
        report.ignored.append(other.key)
    else:
        report.other.append(
            f"{other.key} differs from {entry.key}, which the model ties to it; build it untied"
        )


def _union(lists: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(line for found in lists for line in found))


def _dtypes(source: Source) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for entry in source.entries.values():
        counts[str(entry.dtype).removeprefix("torch.")] += torch.Size(entry.shape).numel()
    return dict(counts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
