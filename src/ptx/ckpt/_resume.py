"""Load the newest step that verifies: rank 0 chooses, all ranks verify, and only then anything is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._match import Options, match
from ptx.ckpt._parts import Part
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._read import Files, copies, fill, verify_share
from ptx.ckpt._step import Step

LOG = logging.getLogger("ptx.ckpt")


def load_newest(
    root: str, ranks: Ranks, parts: Mapping[str, Part], step: int | None, options: Options
) -> Step | None:
    """Load ``step`` (None: the newest) into ``parts``; a damaged one is reported and passed over.

    Args:
        root: Where the steps are.
        ranks: All of them call this.
        parts: The same keys on every rank.
        step: An explicit one has no substitute.
        options: What doesn't have to fit.

    Returns:
        The step that was loaded; None if none was ever committed.

    Raises:
        ValueError: The step isn't there, or the state doesn't fit. On all ranks.
        RuntimeError: No step verifies, or an object refused its state. On all ranks.
    """
    candidates = _candidates(root, ranks, step)
    damage: list[str] = []
    for number, folder in candidates:
        found = _read(folder, ranks)
        if isinstance(found, str):
            damage.append(_report(ranks, number, [found]))
            continue
        loaded, wrong = _try(found, folder, ranks, parts, options)
        if not wrong:
            return loaded
        damage.append(_report(ranks, number, wrong))
    if damage:
        which = "it doesn't verify" if step is not None else f"none of {len(damage)} steps verifies"
        raise RuntimeError(f"load: {which}: " + "; ".join(damage[:8]))
    return None


def _candidates(root: str, ranks: Ranks, step: int | None) -> list[tuple[int, str]]:
    """Steps to try, the best first; rank 0's view."""
    error: Exception | None = None
    chosen: list[tuple[int, str]] = []
    if ranks.rank == 0:
        try:
            found = _disk.step_folders(root)
            if step is None:
                chosen = sorted(found.items(), reverse=True)
            elif step in found:
                chosen = [(step, found[step])]
            else:
                error = ValueError(
                    f"load: there is no step {step} in {root}; there are {list(found)}"
                )
        except OSError as problem:
            error = problem
    ranks.raise_together(error)
    return ranks.from_first(chosen)


def _read(folder: str, ranks: Ranks) -> Any:
    """The manifest that rank 0 read, or what is wrong with it."""
    found: tuple[bytes | None, str] = (None, "")
    if ranks.rank == 0:
        try:
            raw, manifest = _disk.read_manifest(folder)
            _disk.check_sizes(folder, manifest)
            found = (raw, "")
        except _disk.DamagedError as error:
            found = (None, str(error))
    raw_or_none, problem = ranks.from_first(found)
    if raw_or_none is None:
        return problem
    return json.loads(raw_or_none.partition(b"\n")[2])


def _try(
    manifest: Any, folder: str, ranks: Ranks, parts: Mapping[str, Part], options: Options
) -> tuple[Step | None, list[str]]:
    """The step, loaded; or what is damaged, with nothing written."""
    error: Exception | None = None
    try:
        step = Step(folder, manifest)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    matches = match(step, parts, ranks, options)
    damage: list[str] = []
    try:
        reads = copies(step, matches)
        files = Files(step)
        damage = verify_share(files, reads, ranks.rank, ranks.size)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    if any(count for (count,) in ranks.gather([len(damage)])):
        return None, [text for some in ranks.gather_objects(damage) for text in some]

    reports: dict[str, str] = {}
    try:
        fill(files, matches, reads)
        for each in matches:
            try:
                if report := each.write(step.number):
                    reports[each.key] = report
            except Exception as problem:
                raise RuntimeError(f"load: {each.key!r} refused its state: {problem}") from problem
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    if ranks.rank == 0:
        for key, report in reports.items():
            LOG.warning("step %d: %r was %s", step.number, key, report)
    return step, []


def _report(ranks: Ranks, number: int, wrong: Sequence[str]) -> str:
    text = f"step {number} is damaged: {'; '.join(dict.fromkeys(wrong))}"
    if ranks.rank == 0:
        LOG.warning("%s", text)
    return text
