"""What lies beside the weights in a model's folder: configuration and tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ptx.hf._tokens import HfTokenizer, load_tokenizer
from ptx.model import Transformer
from ptx.model._to_hf import hf_config

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = "generation_config.json"


def config_for(
    model: nn.Module, dtype: torch.dtype | None, vocab_size: int | None, tokenizer: object
) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Raises:
        ValueError: It is no model whose configuration is known.
    """
    if isinstance(model, Transformer):
        config = hf_config(model.args) | special_ids(tokenizer)
    elif callable(getattr(getattr(model, "config", None), "to_diff_dict", None)):
        config = copy.deepcopy(model.config).to_diff_dict()  # type: ignore[union-attr, operator]
        config["architectures"] = [_class_name(model)]
        tied = _is_tied(model)
        config["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
        if tied is not None:
            config["tie_word_embeddings"] = tied
    else:
        raise ValueError(
            f"{type(model).__name__} has no configuration that transformers could read; use"
            " AsyncCheckpointer"
        )
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    dtypes = {dtype or p.dtype for p in model.parameters() if p.is_floating_point()}
    config.pop("dtype", None)
    # The name that transformers 4 and 5 both read.
    config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    return config


def check_tokenizer(tokenizer: object) -> None:
    """Raises ValueError if `write_extras` couldn't take files from it."""
    if tokenizer is None or isinstance(tokenizer, HfTokenizer):
        return
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        if path.is_file() or (path.is_dir() and _found(path)):
            return
        raise ValueError(f"tokenizer={str(tokenizer)!r} is no folder or file with a tokenizer")
    if not hasattr(tokenizer, "save_pretrained") and not hasattr(tokenizer, "to_str"):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}; pass a folder, or a tokenizer of"
            " transformers or tokenizers"
        )


def write_extras(
    folder: Path, model: nn.Module | None, config: dict[str, Any], tokenizer: object
) -> None:
    """Writes ``config.json``, ``generation_config.json`` if there is one, and tokenizer files."""
    _write(folder / "config.json", config)
    if isinstance(tokenizer, HfTokenizer):
        tokenizer = tokenizer.files
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        for file in [path] if path.is_file() else _found(path):
            shutil.copyfile(file, folder / ("tokenizer.json" if path.is_file() else file.name))
        generation = path / _GENERATION
        if generation.is_file():
            shutil.copyfile(generation, folder / _GENERATION)
    elif save := getattr(tokenizer, "save_pretrained", None):
        save(str(folder))
    elif to_str := getattr(tokenizer, "to_str", None):
        (folder / "tokenizer.json").write_text(to_str(), encoding="utf-8")
        _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    if write := getattr(getattr(model, "generation_config", None), "to_json_file", None):
        write(str(folder / _GENERATION))


def special_ids(tokenizer: object) -> dict[str, Any]:
    """Fields of a configuration that a tokenizer knows."""
    if isinstance(tokenizer, str | Path) and Path(tokenizer).exists():
        tokenizer = load_tokenizer(tokenizer)
    if not isinstance(tokenizer, HfTokenizer):
        return {}
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _found(folder: Path) -> list[Path]:
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _class_name(model: nn.Module) -> str:
    # fully_shard made a class of its own.
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)).__name__


def _is_tied(model: nn.Module) -> bool | None:
    ends: list[object] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        find = getattr(model, getter, None)
        ends.append(getattr(find() if callable(find) else None, "weight", None))
    return None if any(end is None for end in ends) else ends[0] is ends[1]


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
