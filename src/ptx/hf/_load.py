"""Load a Hugging Face checkpoint into a model that may be sharded, each rank its own part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ptx.hf._hub import hf_folder_of_ranks
from ptx.hf._ranks import Ranks
from ptx.hf._read import Reader
from ptx.hf._report import HfReport, Job, compare
from ptx.hf._targets import parts_of, targets_of
from ptx.parallel import materialize
from ptx.parallel._init_run import slots_of

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def load_hf(
    model: M,
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> M:
    """Fills a model with the weights of a Hugging Face checkpoint, in place.

    Each rank reads the bytes of its own shards from the safetensors files, nothing else, whatever
    the mesh, and casts them to the dtype that its parameters have. Parameters on meta are made real
    first, and buffers restored, as by ``materialize(model, device, seed=None)``; the device is that
    of the model's mesh, or the CPU for a model without one.

    Names are compared first, on all ranks, and nothing is written unless all agree. Every tensor
    of the model must be on file, and every tensor on file in the model, with its shape. Passed over
    are ``rotary_emb.inv_freq`` of old files, and a head that equals the embedding it is tied to.

    Args:
        model: `ptx.Transformer`, a transformers model, or one whose names are those in the file;
            after apply_tp and apply_fsdp2, or neither. Or the list of a pipeline's parts.
        path_or_repo: A folder (``model.safetensors``, or several with an index), a file, or a
            repository of the hub, which `hf_folder` downloads, once per host.
        revision: Branch, tag or commit of a repository.
        token: For a repository that asks for one.
        dtype: What floating parameters become, e.g. float32 for a transformers model that was built
            in the file's bfloat16; None: they stay as they are. Buffers stay in any case.
        vocab_size: Rows that embedding and head have on file, if the model's are padded to more: the
            rest becomes zero. Give it to the losses as well.

    Returns:
        The same model.

    Raises:
        ValueError: Names that are missing, unexpected or misshapen, all listed; files that aren't
            whole; a repository that can't be had. Every rank raises, and the model is as it was. Or
            reading failed half-way: every rank raises, and parameters hold NaN or values on file.

    Cost: each rank's part is read once; of a matrix split over columns, rows shorter than 4 KiB per
    rank are read whole. Host memory beyond the shards: 8 MiB. Two or three small object gathers over
    the mesh's ranks. A model without DTensors is loaded by each process for itself.

    Source: the format: huggingface/safetensors.
    """
    where = "load_hf"
    parts = parts_of(model)
    ranks = Ranks.of(parts)
    path = hf_folder_of_ranks(path_or_repo, revision, token, ranks, where)
    report, jobs = compare(parts, path, vocab_size, ranks, where)
    ranks.raise_found(f"{where}: {path} doesn't fit the model", [report.problems])
    for part in parts:
        if dtype is not None:
            _cast_parameters(part, dtype)
        if any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
            materialize(part, ranks.mesh.device_type if ranks.mesh else "cpu", seed=None)
    ranks.raise_together(f"{where}: reading {path} failed", _fill(parts, jobs))
    return model


def hf_report(
    model: nn.Module | Sequence[nn.Module],
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    vocab_size: int | None = None,
) -> HfReport:
    """What `load_hf` would do with the same arguments, without doing it: print it.

    Args:
        model: As for `load_hf`. On meta it costs nothing; it isn't changed.
        path_or_repo: As for `load_hf`.
        revision: As for `load_hf`.
        token: As for `load_hf`.
        vocab_size: As for `load_hf`.

    Returns:
        Names that are missing, unexpected or misshapen, and what would be read. ``problems`` is
        empty if it can be loaded.

    Raises:
        ValueError: There is nothing to compare: no such folder or repository, broken files.

    Cost: the files' headers, and a head that is on file although the model ties it.
    """
    parts = parts_of(model)
    ranks = Ranks.of(parts)
    path = hf_folder_of_ranks(path_or_repo, revision, token, ranks, "hf_report")
    return compare(parts, path, vocab_size, ranks, "hf_report")[0]


def _cast_parameters(part: nn.Module, dtype: torch.dtype) -> None:
    # Only to() sets up what FSDP keeps of a parameter's dtype; and it casts buffers, RoPE's too.
    buffers = [slot for slot in slots_of(part) if slot.is_buffer]
    part.to(dtype)
    for slot in buffers:
        slot.store[slot.key] = slot.tensor


def _fill(parts: list[nn.Module], jobs: list[Job]) -> list[str]:
    """What went wrong; a rank that fails must not keep the others waiting."""
    # Casting and materialising may have put other tensors in a buffer's place.
    now: dict[str, Tensor] = {
        target.name: target.tensor for part in parts for target in targets_of(part)
    }
    try:
        with Reader() as reader:
            for job in sorted(jobs, key=lambda job: (job.entry.file, job.entry.start)):
                reader.fill(now[job.target.name], job.entry)
    except (OSError, ValueError) as error:
        return [str(error)]
    return []
