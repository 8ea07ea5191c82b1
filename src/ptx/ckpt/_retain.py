"""Which steps go once a newer one is committed, and which never do."""

from __future__ import annotations

from typing import Any

from ptx.ckpt import _disk
from ptx.ckpt._store import Store


def retain(store: Store, job: Any) -> None:
    """Delete what a commit replaced, and steps older than the ``keep`` newest that are whole.

    A step counts as whole by its manifest, and if all its files have their sizes, and no load of
    this job found it damaged: damaged steps never push out a whole one. What was just committed,
    what ``keep_every`` divides, what someone reads and what has no manifest is spared.

    Args:
        store: Where the steps are.
        job: Of the save that was committed.
    """
    for path in store.replaced(job["step"], job["folder"]):
        store.discard_unread(path)
    keep, every = job["keep"], job["keep_every"]
    if not keep:
        return
    whole: set[int] = set()
    for step, path in store.folders():
        if len(whole) < keep:
            if _is_whole(store, path, job["damaged"]):
                whole.add(step)
        elif (
            step not in whole
            and step != job["step"]
            and not (every and step % every == 0)
            and store.has_manifest(path)
        ):
            store.discard_unread(path)


def _is_whole(store: Store, path: str, damaged: list[str]) -> bool:
    try:
        _, manifest = store.manifest(path)
        store.check_sizes(path, manifest)
    except _disk.DamagedError:
        return False
    return manifest["attempt"] not in damaged
