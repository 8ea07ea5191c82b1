"""Folders as transformers writes them, of tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Here, so that ranks are forked with it; it loads classes when they are first asked for.
from transformers import (  # noqa: F401
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

import ptx
from model.families import CASES, build, config_of


def write(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """``save_pretrained`` of a model of `families`, in several files."""
    build(name, **changes).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Every tensor on file, read by the safetensors library."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def rewrite(folder: Path, tensors: dict[str, Tensor], *, keep_config: bool = True) -> Path:
    """Puts other tensors, in one file, in place of those of a folder."""
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not keep_config:
        (folder / "config.json").unlink()
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def meta_model(whose: str, folder: Path, name: str, **changes: Any) -> nn.Module:
    """Ours, or transformers' own, for a folder that `write` made."""
    with torch.device("meta"):
        if whose == "ptx":
            return ptx.Transformer(ptx.ModelArgs.from_hf(folder))
        kind = getattr(transformers, f"{CASES[name].family}ForCausalLM")
        return kind(config_of(name, **changes)).to(torch.float32)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
