"""Write a model, sharded or not, as a folder that transformers opens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from ptx.hf._extras import check_tokenizer, config_for, write_extras
from ptx.hf._layout import File, Piece, Share, lay_out
from ptx.hf._ranks import Ranks
from ptx.hf._targets import Target, misplaced, parts_of, targets_of
from ptx.hf._write import commit, draft_name, is_taken, make_draft, write_file, write_index


def save_hf(
    model: nn.Module | Sequence[nn.Module],
    path: str | os.PathLike[str],
    *,
    tokenizer: object = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    file_bytes: int | None = None,
) -> Path:
    """Writes a model as a new folder that ``AutoModelForCausalLM.from_pretrained`` opens.

    The folder holds safetensors (with an index, if there are several), ``config.json``, and the
    tokenizer's files. It appears under its name when everything in it is on disk, or not at all.
    Tensors are gathered one after the other, and each file is written by one rank. A tied head is
    written once, as the embedding.

    Args:
        model: `ptx.Transformer` or a transformers model, however it is wrapped; or the list of a
            pipeline's parts. Every rank that has a part of it calls this.
        path: A folder that doesn't exist yet, or is empty; seen by all ranks.
        tokenizer: Where to take the tokenizer's files from: the folder that the model came from, a
            ``tokenizer.json``, what `load_tokenizer` returned, or a tokenizer of transformers or of
            tokenizers. A folder also gives the ids of the special tokens, and generation_config.
        dtype: What floating tensors are cast to; None: the parameters' own, float32 for master weights.
        vocab_size: Rows of embedding and head to write, if the model's are padded to more.
        file_bytes: Most bytes in one file; None: an equal share for each rank, at most 5 GB.

    Returns:
        The folder.

    Raises:
        ValueError: The folder exists; no transformers model computes what this one does; parameters
            are on meta; a rank can't write. Every rank raises, and nothing is left behind.

    Cost: each tensor is gathered on all ranks of its mesh, one at a time: with the buffers for that,
        memory for up to five times the largest in ``dtype`` (measured with gloo). A model without
        DTensors is written by the process that calls this; if several do, all but one raise.

    Source: what transformers reads: its ``save_pretrained``.
    """
    where, path = "save_hf", Path(path)
    parts = parts_of(model)
    ranks = Ranks.of(parts)
    targets: dict[str, Target] = {}
    problems: list[str] = []
    share, config = None, {}
    try:
        for target in (target for part in parts for target in targets_of(part)):
            assert target.keys[0] not in targets, target.keys
            targets[target.keys[0]] = target
        problems = _problems([*targets.values()], path, dtype, vocab_size)
        check_tokenizer(tokenizer)
        config = config_for(parts[0], dtype, vocab_size, tokenizer)
        share = _share(targets, ranks, dtype, vocab_size)
    except ValueError as error:
        problems.append(str(error))
    own = draft_name(path)
    everyone = ranks.gather((problems, path, own, share))
    ranks.raise_found(where, [lines for lines, *_ in everyone])
    if len(paths := {str(theirs) for _, theirs, _, _ in everyone}) > 1:
        raise ValueError(f"{where}: ranks were given several folders: {', '.join(sorted(paths))}")
    draft = everyone[0][2]  # one name for all
    leads = draft == own
    files = lay_out([share for *_, share in everyone if share], file_bytes)

    try:
        made = _attempt(make_draft, draft) if leads else []
        ranks.raise_together(where, made)
        problems = _write_files(files, draft, targets, ranks.rank)
        if leads:
            problems += _attempt(write_index, files, draft)
            problems += _attempt(write_extras, draft, parts[0], config, tokenizer)
        ranks.raise_together(where, problems)
        ranks.raise_together(where, _attempt(commit, draft, path) if leads else [])
    finally:
        if leads:
            shutil.rmtree(draft, ignore_errors=True)
    return path


def _problems(
    targets: list[Target], path: Path, dtype: torch.dtype | None, vocab_size: int | None
) -> list[str]:
    problems = misplaced(targets)
    if is_taken(path):
        problems.append(
            f"{path} exists; choose a new folder (a model without a mesh is saved by one rank alone)"
        )
    if dtype is not None and not dtype.is_floating_point:
        problems.append(f"dtype={dtype} can't hold weights")
    if meta := [target.name for target in targets if target.tensor.is_meta]:
        problems.append(f"{len(meta)} tensors are on meta, {meta[0]} for one; load them first")
    rows = [target.tensor.shape[0] for target in targets if target.is_vocabulary]
    if vocab_size is not None and not all(0 < vocab_size <= n for n in rows):
        problems.append(f"vocab_size={vocab_size}, but the model has {rows} rows")
    return problems


def _share(
    targets: dict[str, Target], ranks: Ranks, dtype: torch.dtype | None, vocab_size: int | None
) -> Share | None:
    """What to announce; None from all ranks but the first of those that have the same."""
    meshes = {t.tensor.device_mesh for t in targets.values() if isinstance(t.tensor, DTensor)}
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is not None and any(mesh.get_coordinate() or ()):
        return None
    members = (ranks.rank,) if mesh is None else tuple(mesh.mesh.flatten().tolist())
    return Share(
        members,
        tuple(_piece(key, target, dtype, vocab_size) for key, target in targets.items()),
    )


def _piece(key: str, target: Target, dtype: torch.dtype | None, vocab_size: int | None) -> Piece:
    shape = tuple(target.tensor.shape)
    if vocab_size is not None and target.is_vocabulary:
        shape = (vocab_size, *shape[1:])
    is_float = target.tensor.is_floating_point()
    return Piece(key, dtype if dtype is not None and is_float else target.tensor.dtype, shape)


def _write_files(
    files: list[File], draft: Path, targets: dict[str, Target], rank: int
) -> list[str]:
    """Gathers what this rank has a part of, and writes the files that are its own."""
    problems: list[str] = []
    for file in files:
        if rank not in file.ranks:
            continue
        tensors = (_whole(targets[piece.key].tensor, piece) for piece in file.pieces)
        if file.writer == rank and not problems:
            problems = _attempt(write_file, draft / file.name, file.pieces, tensors)
        for _ in tensors:  # who doesn't write, or can't, still takes part: others wait for it
            pass
    return problems


def _whole(tensor: Tensor, piece: Piece) -> Tensor:
    with torch.no_grad():
        whole = _gathered(tensor.detach().to(piece.dtype))
        return whole[: piece.shape[0]] if piece.shape else whole


def _gathered(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # One mesh dim at a time: full_tensor() logs a warning when it has to do so. The dim that was
    # split last is gathered first; where FSDP split what TP had, that is the strided one.
    placements = list(tensor.placements)
    dims = sorted(
        range(len(placements)), key=lambda d: (isinstance(placements[d], _StridedShard), d)
    )
    for dim in reversed(dims):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _attempt(action: Callable[..., object], *args: object) -> list[str]:
    try:
        action(*args)
    except (OSError, ValueError) as error:
        return [str(error)]
    return []
