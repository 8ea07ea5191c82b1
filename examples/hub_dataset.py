"""The files of a dataset repository on the Hugging Face hub: one download per host, at one commit."""

from __future__ import annotations

import errno
import fnmatch
import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sources import known_format

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_TIMEOUT = 10.0  # seconds to wait for the hub's first answer


@dataclass(frozen=True)
class HubFiles:
    """Files of a dataset repository, wherever they are.

    Args:
        repo: ``org/name``.
        revision: What was asked for.
        commit: Which that is: the same on every rank, even if the branch moves on.
        names: Of the files, in order.
    """

    repo: str
    revision: str | None
    commit: str
    names: tuple[str, ...]


def is_repository(name: str) -> bool:
    """Whether it has the form of a repository's name, ``org/name``."""
    return _REPOSITORY.fullmatch(name) is not None


def find_dataset(
    repo: str,
    *,
    split: str = "train",
    files: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> HubFiles:
    """Asks the hub for the commit and the files of a dataset's split; downloads none.

    With ``HF_HUB_OFFLINE=1`` nothing is asked, and what the cache of huggingface_hub has is taken.

    Args:
        repo: ``org/name``.
        split: Those files are taken that have it in their path: ``data/train-00000-of-00002.parquet``,
            ``train.jsonl``, ``train/0.txt``. A repository that names no splits is all "train".
        files: Glob of files instead, ``"en/*.parquet"``.
        revision: Branch, tag or commit; None: the main branch.
        token: For gated and private ones; None: the one saved by ``hf auth login``, if any.

    Raises:
        ValueError: The hub can't be reached or refuses, there is no such repository, revision or
            split, or the split's files lie in several folders: ``files`` then has to say which.

    Cost: one small request, for which it waits 10 s at most.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        commit, there = _cached_names(repo, revision)
    else:
        try:
            info = HfApi(token=token).dataset_info(repo, revision=revision, timeout=_TIMEOUT)
        except Exception as error:
            raise ValueError(f"find_dataset: {_explained(error, repo, revision)}") from error
        commit, there = str(info.sha), [sibling.rfilename for sibling in info.siblings or ()]
    return HubFiles(repo, revision, commit, tuple(choose(there, repo, split=split, files=files)))


def choose(there: Sequence[str], repo: str, *, split: str, files: str | None) -> list[str]:
    """Which files of a repository are a split's; see `find_dataset`."""
    known = sorted(name for name in there if known_format(name))
    if files is not None:
        chosen = [name for name in known if fnmatch.fnmatchcase(name, files)]
    else:
        chosen = [name for name in known if split in _splits_in(name, split)]
        if not chosen and split == "train" and not any(_splits_in(name, split) for name in known):
            chosen = known
    # README.txt and its kind are no data where there are files of a format made for data.
    for kind in ("parquet", "jsonl", "text"):
        if some := [name for name in chosen if known_format(name) == kind]:
            chosen = some
            break
    if not chosen:
        wanted = f"file like {files!r}" if files is not None else f"split {split!r}"
        raise ValueError(
            f"find_dataset: {repo} has no {wanted} of parquet, JSON lines or text; it has"
            f" {_few(known or sorted(there))}"
        )
    folders = {str(PurePosixPath(name).parent) for name in chosen}
    if files is None and len(folders) > 1:
        raise ValueError(
            f"find_dataset: {repo} has files of split {split!r} in several folders, perhaps not the"
            f" same data: {_few(sorted(folders))}; say which files, as a glob"
        )
    return chosen


def download(
    found: HubFiles,
    say: Callable[[str], None] | None = None,
    *,
    token: str | bool | None = None,
) -> list[Path]:
    """The local files, downloaded unless the cache of huggingface_hub has them all.

    Ranks of a host call it one after the other (`token_cache.one_at_a_time`): the first downloads.

    Raises:
        ValueError: The hub doesn't answer, a download breaks off, or the branch has moved on.
    """
    from huggingface_hub import constants, snapshot_download

    if (files := _cached(found)) is not None:
        return files
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"download: {found.repo} at {found.commit} isn't wholly in the cache of huggingface_hub,"
            " and HF_HUB_OFFLINE is set; download it once without"
        )
    if say:
        what = f"{len(found.names)} file{'s' * (len(found.names) != 1)}"
        say(f"downloading {what} of {found.repo}, commit {found.commit[:8]}")
    try:
        folder = snapshot_download(
            found.repo,
            repo_type="dataset",
            revision=found.revision,  # the branch, so that it is known offline
            token=token,
            allow_patterns=[glob.escape(name) for name in found.names],
        )
    except Exception as error:
        raise ValueError(f"download: {_explained(error, found.repo, found.revision)}") from error
    files = _cached(found)
    if files is None:  # an older copy, or a newer commit
        raise ValueError(
            f"download: {found.repo} was at commit {found.commit} on the hub, and only"
            f" {Path(folder).name} could be had; try again"
        )
    return files


def _splits_in(name: str, split: str) -> set[str]:
    words = set(re.split(r"[/_.-]", name.lower()))
    return {known for known in (*_SPLITS, split) if known.lower() in words}


def _cached(found: HubFiles) -> list[Path] | None:
    from huggingface_hub import try_to_load_from_cache

    files = []
    for name in found.names:
        file = try_to_load_from_cache(found.repo, name, revision=found.commit, repo_type="dataset")
        if not isinstance(file, str):
            return None
        files.append(Path(file))
    return files


def _cached_names(repo: str, revision: str | None) -> tuple[str, list[str]]:
    from huggingface_hub import get_cached_repo_tree, snapshot_download

    try:
        # The listing that the download left there also tells what is missing.
        names = [
            file.path for file in get_cached_repo_tree(repo, repo_type="dataset", revision=revision)
        ]
        folder = snapshot_download(
            repo, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=[]
        )
    except Exception as error:
        what = f"{repo} at {revision}" if revision else repo
        raise ValueError(
            f"find_dataset: {what} isn't in the cache of huggingface_hub, and HF_HUB_OFFLINE is set;"
            f" download it once without, or pass files ({_first_line(error)})"
        ) from error
    return Path(folder).name, names


def _explained(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import errors

    said: Any = getattr(error, "response", None)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{repo}: the disk of huggingface_hub's cache is full; make room, or set HF_HOME"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated; ask for access on its page, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo} is no file or folder here, and no dataset on the hub that this token may read;"
            " check the name, or `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if isinstance(error, errors.HfHubHTTPError) and said is not None:
        return (
            f"{repo}: the hub answered {said.status_code} ({_first_line(error)}); try again later"
        )
    return (
        f"{repo}: the hub doesn't answer ({type(error).__name__}: {_first_line(error)}); set"
        " HF_HUB_OFFLINE=1 to use what was downloaded before, or pass local files or 'corpus'"
    )


def _few(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
