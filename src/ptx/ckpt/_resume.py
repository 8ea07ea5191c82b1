"""Load the newest step that verifies: rank 0 chooses, all ranks verify, and only then anything is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._match import Options, match
from ptx.ckpt._parts import Part
from ptx.ckpt._ranks import Ranks
from ptx.ckpt._read import Files, copies, fill, verify_share
from ptx.ckpt._step import Step
from ptx.ckpt._store import LocalStore, Store

LOG = logging.getLogger("ptx.ckpt")
LOOKS = 16  # for steps, if those found are deleted before they are read


@dataclass
class Source:
    """Where a load comes from.

    Attributes:
        store: With the steps.
        scratch: A folder for what comes from a URL.
        damaged: Attempts that were found damaged; a load appends.
    """

    store: Store
    scratch: str | None
    damaged: list[str]

    def files(self, step: Step) -> Files:
        if isinstance(self.store, LocalStore):
            return Files(step)
        from ptx.ckpt._download import Downloads
        from ptx.ckpt._remote import RemoteStore

        assert isinstance(self.store, RemoteStore)
        assert self.scratch is not None
        return Downloads(step, self.store, self.scratch)


def load_newest(
    source: Source, ranks: Ranks, parts: Mapping[str, Part], step: int | None, options: Options
) -> Step | None:
    """Load ``step`` (None: the newest) into ``parts``; a damaged one is reported and passed over.

    Args:
        source: Where the steps are.
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
    for _ in range(LOOKS):
        damage: list[str] = []
        for number, folder in _candidates(source.store, ranks, step):
            # One rank's is enough: it lets go after the last rank has read.
            mark = source.store.reading(folder) if ranks.rank == 0 else nullcontext()
            with mark:
                loaded, wrong = _load(source, folder, ranks, parts, options)
            if loaded is not None:
                return loaded
            if _vanished(source.store, folder, ranks):
                break  # deleted by retention, so there is a newer one
            damage.append(_report(ranks, number, wrong))
        else:
            if not damage:
                return None
            which = (
                "it doesn't verify" if step is not None else f"none of {len(damage)} steps verifies"
            )
            raise RuntimeError(f"load: {which}: " + "; ".join(damage[:8]))
    raise RuntimeError(f"load: the steps in {source.store.root} are deleted faster than they load")


def _candidates(store: Store, ranks: Ranks, step: int | None) -> list[tuple[int, str]]:
    """Steps to try, the best first; rank 0's view."""
    error: Exception | None = None
    chosen: list[tuple[int, str]] = []
    if ranks.rank == 0:
        try:
            found = store.folders()
            chosen = [one for one in found if step in (None, one[0])]
            if step is not None and not chosen:
                there = sorted({number for number, _ in found})
                error = ValueError(
                    f"load: there is no step {step} in {store.root}; there are {there}"
                )
        except Exception as problem:
            error = problem
    ranks.raise_together(error)
    return ranks.from_first(chosen)


def _load(
    source: Source, folder: str, ranks: Ranks, parts: Mapping[str, Part], options: Options
) -> tuple[Step | None, list[str]]:
    """The step, loaded; or what is damaged, with nothing written."""
    found = _read(source.store, folder, ranks)
    if isinstance(found, str):
        return None, [found]
    loaded, wrong = _try(found, source, folder, ranks, parts, options)
    if wrong:
        source.damaged.append(found["attempt"])
    return loaded, wrong


def _vanished(store: Store, folder: str, ranks: Ranks) -> bool:
    return ranks.from_first(ranks.rank == 0 and not store.is_there(folder))


def _read(store: Store, folder: str, ranks: Ranks) -> Any:
    """The manifest that rank 0 read, or what is wrong with it."""
    found: tuple[bytes | None, str] = (None, "")
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            raw, manifest = store.manifest(folder)
            store.check_sizes(folder, manifest)
            with suppress(ValueError):  # which all ranks raise below
                Step(folder, manifest)
            found = (raw, "")
        except _disk.DamagedError as problem:
            found = (None, str(problem))
        except Exception as problem:  # of a network, say
            error = problem
    ranks.raise_together(error)
    raw_or_none, text = ranks.from_first(found)
    if raw_or_none is None:
        return text
    return json.loads(raw_or_none.partition(b"\n")[2])


def _try(
    manifest: Any,
    source: Source,
    folder: str,
    ranks: Ranks,
    parts: Mapping[str, Part],
    options: Options,
) -> tuple[Step | None, list[str]]:
    """The step, loaded; or what is damaged, with nothing written."""
    error: Exception | None = None
    try:
        step = Step(folder, manifest)
    except Exception as problem:
        error = problem
    ranks.raise_together(error)
    matches = match(step, parts, ranks, options)
    with closing(source.files(step)) as files:
        damage: list[str] = []
        try:
            reads = copies(step, matches)
            damage = verify_share(files, reads, ranks.rank, ranks.size)
        except Exception as problem:
            error = problem
        ranks.raise_together(error)
        if any(count for (count,) in ranks.gather([len(damage)])):
            return None, [text for some in ranks.gather_objects(damage) for text in some]
        try:
            fill(files, matches, reads)
        except Exception as problem:
            error = problem
    reports: dict[str, str] = {}
    try:
        if error:
            raise error
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
