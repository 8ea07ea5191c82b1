"""The shape of the model to train: a preset's, with explicit sizes instead, or a pretrained one's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

import ptx

SIZES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "multiple_of",
    "ffn_dim_multiplier",
    "rope_theta",
    "norm_eps",
    "vocab_size",
    "tie_embeddings",
)


class Options(Protocol):
    """``arguments.Model``."""

    name: str
    model_revision: str | None


def is_pretrained(name: str) -> bool:
    """Whether it is a folder or a repository; presets have no slash in their names."""
    return "/" in name or Path(name).is_dir()


def check_model(options: Options) -> list[str]:
    """What can't work, as far as can be told without a download."""
    given = _given(options)
    if is_pretrained(options.name):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return [f"{flags}: {options.name} is pretrained, its sizes are fixed"] if given else []
    try:
        _sized(ptx.preset(options.name), given)
    except ValueError as error:
        return [str(error)]
    if options.model_revision is not None:
        return [f"--model-revision is for pretrained models, {options.name} is a preset"]
    return []


def find_pretrained(options: Options, mesh: DeviceMesh) -> Path | None:
    """The folder of a pretrained model, downloaded if need be; None for a preset. All ranks call it."""
    if not is_pretrained(options.name):
        return None
    return ptx.hf_folder(options.name, revision=options.model_revision, mesh=mesh)


def choose_model(
    options: Options, pretrained: Path | None, vocab_size: int, seq_len: int
) -> ptx.ModelArgs:
    """The arguments of the model.

    Args:
        options: The command line's; sizes given there beat a preset's.
        pretrained: Of `find_pretrained`.
        vocab_size: Of the data: a preset's model gets as many rows, a pretrained one must have them.
        seq_len: Of the data.

    Raises:
        ValueError: The data has more entries, or the samples more tokens, than the model knows.
    """
    if pretrained is not None:
        args = ptx.ModelArgs.from_hf(pretrained)
    else:
        rows = {"vocab_size": vocab_size, "max_seq_len": seq_len}
        args = _sized(ptx.preset(options.name), rows | _given(options))
    if args.vocab_size < vocab_size:
        fix = "leave --vocab-size out" if pretrained is None else "use its own, without --tokenizer"
        raise ValueError(
            f"--model {options.name} has {args.vocab_size} entries in its vocabulary, the tokenizer of"
            f" the data has {vocab_size}; {fix}"
        )
    if args.max_seq_len < seq_len:
        raise ValueError(
            f"--model {options.name} was made for {args.max_seq_len} tokens, --seq-len is {seq_len}"
        )
    return args


def _given(options: Options) -> dict[str, Any]:
    return {name: value for name in SIZES if (value := getattr(options, name)) is not None}


def _sized(args: ptx.ModelArgs, given: dict[str, Any]) -> ptx.ModelArgs:
    if given.keys() & {"dim", "multiple_of", "ffn_dim_multiplier"}:
        args = replace(args, hidden_dim=None)  # follows from these, unless it is given too
    return replace(args, **given)
