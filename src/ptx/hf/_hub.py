"""The folder of a model: a local one, or a snapshot of a repository on the Hugging Face hub."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ptx.hf._ranks import Ranks

_WANTED = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*",
    "merges.txt",
    "vocab*",
]
# Folders (other formats, optimizer states), and the same weights once more in Meta's row order.
_UNWANTED = ["*/*", "consolidated*"]
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TIMEOUT = 10.0  # seconds to wait for the hub's first answer


def hf_folder(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    mesh: DeviceMesh | None = None,
) -> Path:
    """The local folder of a model, downloaded from the Hugging Face hub unless it is one already.

    What is cached isn't downloaded again, but the hub is asked which commit ``revision`` is, and
    an error raised if it doesn't answer: an older copy never takes its place. ``HF_HUB_OFFLINE=1``
    says that the cached copy is wanted. Cache, endpoint and token are huggingface_hub's.

    Args:
        path_or_repo: A folder or a safetensors file; else a repository, ``"org/name"``.
        revision: Branch, tag or commit of the repository; None: its main branch.
        token: For gated and private ones; None: the one saved by ``hf auth login``, if any.
        mesh: All of its ranks call this, one of each host downloads, and all get the same commit or
            raise together. None: this process alone.

    Returns:
        The folder (or file) with configuration, tokenizer and safetensors.

    Raises:
        ValueError: It doesn't exist, the hub can't be reached or refuses, or a download breaks off.

    Cost: two small requests; the files at the first time.
    """
    return hf_folder_of_ranks(path_or_repo, revision, token, Ranks(mesh), "hf_folder")


def hf_folder_of_ranks(
    path_or_repo: str | os.PathLike[str],
    revision: str | None,
    token: str | bool | None,
    ranks: Ranks,
    where: str,
) -> Path:
    """`hf_folder` on all ranks of a model: one per host downloads, all use the same commit."""
    found, problems = None, []
    try:
        found = _local(path_or_repo, revision)
    except ValueError as error:
        problems = [str(error)]
    me = (socket.gethostname(), ranks.rank)
    everyone = ranks.gather((*me, found is not None, problems))
    ranks.raise_found(where, [lines for *_, lines in everyone])
    if all(is_local for *_, is_local, _ in everyone):
        assert found is not None
        return found

    # Some may have a folder of that name: their tensors are compared with the others' later.
    repo, downloaded = str(path_or_repo), None
    waiting = [(host, rank) for host, rank, is_local, _ in everyone if not is_local]
    if me == next((pair for pair in waiting if pair[0] == me[0]), None):
        found, problems = _tried(_download, repo, revision, token)
        downloaded = found
    answers = ranks.gather((downloaded and downloaded.name, problems))
    ranks.raise_found(where, [lines for _, lines in answers])
    commits = {commit for commit, _ in answers if commit}
    problems = []
    if len(commits) > 1:
        problems = [f"{repo} moved from one commit to another during the download; try again"]
    elif found is None:
        found, problems = _tried(_of_commit, repo, *commits, token)
    ranks.raise_together(where, problems)
    assert found is not None
    return found


def _tried(
    get: Callable[[str, Any, str | bool | None], Path], *args: Any
) -> tuple[Path | None, list[str]]:
    try:
        return get(*args), []
    except ValueError as error:
        return None, [str(error)]


def _local(path_or_repo: str | os.PathLike[str], revision: str | None) -> Path | None:
    path = Path(path_or_repo)
    if path.exists():
        if revision is not None:
            raise ValueError(f"{path} is local, and revision={revision!r} is for repositories")
        return path
    if isinstance(path_or_repo, str) and _REPOSITORY.fullmatch(path_or_repo):
        return None
    raise ValueError(f"{str(path_or_repo)!r} doesn't exist, and is no repository 'org/name'")


def _download(repo: str, revision: str | None, token: str | bool | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return _cached(repo, revision, token)
    try:
        commit = HfApi(token=token).model_info(repo, revision=revision, timeout=_TIMEOUT).sha
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                token=token,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except Exception as error:
        raise ValueError(_explained(error, repo, revision)) from error
    if folder.name != commit:
        # The client hands out an older copy when the hub stops answering.
        raise ValueError(
            f"{repo} is at commit {commit} on the hub, and only {folder.name} could be had; try again"
        )
    return folder


def _of_commit(repo: str, commit: str, token: str | bool | None) -> Path:
    try:
        return _cached(repo, commit, token)
    except ValueError:  # hosts of one name that share no cache
        return _download(repo, commit, token)


def _cached(repo: str, revision: str | None, token: str | bool | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                token=token,
                local_files_only=True,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except Exception as error:
        what = f"{repo} at {revision}" if revision else repo
        raise ValueError(
            f"{what} isn't, or not wholly, in the cache of huggingface_hub, and HF_HUB_OFFLINE is"
            f" set; download it once without, or pass a folder ({_first_line(error)})"
        ) from error


def _explained(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated; ask for access on its page, then pass token= or `hf auth login`"
            f" ({_first_line(error)})"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo} is no folder here and no repository on the hub that this token may read; check"
            " the name, or pass token="
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return (
            f"{repo} could not be downloaded, the hub answered"
            f" {error.response.status_code} ({_first_line(error)})"
        )
    return (
        f"{repo} could not be downloaded, the hub doesn't answer"
        f" ({type(error).__name__}: {_first_line(error)}); set HF_HUB_OFFLINE=1 to use what is in the"
        " cache, or pass a folder"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
