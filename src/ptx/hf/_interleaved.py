"""Convert checkpoints in the row order of the original Llama into Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ptx.hf._extras import check_tokenizer, special_ids, write_extras
from ptx.hf._layout import Piece, Share, lay_out
from ptx.hf._names import hf_key
from ptx.hf._read import Reader
from ptx.hf._safetensors import Entry, read_header
from ptx.hf._write import commit, fresh_draft, write_file, write_index
from ptx.model import ModelArgs, Transformer
from ptx.model._to_hf import hf_config

_NOT_WEIGHTS = {"rope.freqs"}


def half_split_rows(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k for RoPE that rotates neighbours -> for RoPE that rotates halves.

    In each head the even rows come first: 0, 2, 4, ..., 1, 3, 5, ... Weights of v and o have no
    such order.

    Args:
        rows: [heads * head_dim, ...], the **whole** weight or bias; of a shard, its own heads only.
        heads: Query heads for wq, key/value heads for wk.

    Source: what transformers' Llama converter does.
    """
    pairs: Tensor = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def interleaved_rows(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `half_split_rows`."""
    halves: Tensor = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def convert_interleaved(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    args: ModelArgs,
    *,
    tokenizer: object = None,
    dtype: torch.dtype | None = None,
    file_bytes: int | None = None,
) -> Path:
    """Writes Meta's or Mistral's ``consolidated`` file as a folder for `load_hf` and transformers.

    Their names are those of `Transformer`, and the rows of wq and wk interleaved.

    Args:
        source: ``consolidated.safetensors`` or ``consolidated.00.pth``, whole: not one of several
            that were split for model parallelism.
        target: A folder that doesn't exist yet, or is empty.
        args: The model's arguments, from the ``params.json`` beside the file.
        tokenizer: As for `save_hf`.
        dtype: What is written; None: what is in the file.
        file_bytes: As for `save_hf`.

    Returns:
        The folder.

    Raises:
        ValueError: Names or shapes aren't those of a `Transformer` with these arguments; the folder
            exists.

    Cost: one tensor in memory at a time. Every process that calls this does all of it.
    """
    where = "convert_interleaved"
    check_tokenizer(tokenizer)
    stored = _stored(Path(source))
    shapes = _shapes(args)
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in shapes]
    problems += [
        f"{name} is {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems[:20])
        raise ValueError(f"{where}: {source} isn't a whole model with these arguments:{lines}")
    config = hf_config(args) | special_ids(tokenizer)
    config["torch_dtype"] = str(dtype or stored["norm.weight"].dtype).removeprefix("torch.")
    names = {hf_key(name): name for name in shapes}
    pieces = tuple(
        Piece(key, dtype or stored[name].dtype, shapes[name]) for key, name in names.items()
    )

    def converted(part: tuple[Piece, ...]) -> Iterator[Tensor]:
        with Reader() as reader:
            for piece in part:
                name = names[piece.key]
                yield _converted(name, _tensor(stored[name], reader), args).to(piece.dtype)

    with fresh_draft(Path(target), where) as draft:
        files = lay_out([Share((0,), pieces)], file_bytes)
        for file in files:
            write_file(draft / file.name, file.pieces, converted(file.pieces))
        write_index(files, draft)
        write_extras(draft, None, config, tokenizer)
        commit(draft, Path(target))
    return Path(target)


def _stored(source: Path) -> Mapping[str, Entry | Tensor]:
    if source.suffix == ".safetensors":
        stored: Mapping[str, Entry | Tensor] = {e.key: e for e in read_header(source)}
    else:
        stored = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    return {name: value for name, value in stored.items() if name not in _NOT_WEIGHTS}


def _shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Transformer(args)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _tensor(stored: Entry | Tensor, reader: Reader) -> Tensor:
    if isinstance(stored, Tensor):
        return stored
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    reader.fill(tensor, stored)
    return tensor


def _converted(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    projection = name.split(".")[-2]
    if projection == "wq":
        return half_split_rows(tensor, args.n_heads)
    if projection == "wk":
        return half_split_rows(tensor, args.kv_heads)
    return tensor
