"""What a run does beside training: its histograms, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ptx
from arguments import Args
from baselines import baselines
from data import Data
from generate import generate
from histograms import Activations, histograms, model_tensors, write_histograms
from metrics import RunLog
from report import write_report

BEGINNING = 12  # tokens
COUNTED = 2**25  # tokens at most, for the baselines: they need some 50 bytes for each
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def note_histograms(
    log: RunLog, step: int, model: nn.Module, activations: Activations, mesh: DeviceMesh
) -> None:
    """Histograms of parameters, gradients and activations; all ranks call it, before zero_grad."""
    found = histograms(model_tensors(model))
    # Between blocks each tp rank has a part of the sequence.
    found |= histograms(activations.take(), spread=[ptx.loss_mesh(mesh), mesh["tp"]])
    if log.enabled:
        write_histograms(log.folder / "histograms.jsonl", step, found)


def finish(
    args: Args,
    model: nn.Module,
    data: Data,
    *,
    log: RunLog,
    valid_loss: float,
    tokenizer: str | PathLike[str],
    device: torch.device,
) -> None:
    """The model continues a text, is compared with counting and exported; all ranks call it."""
    sample = None
    if data.tokenizer is not None:
        prompt = args.logging.prompt or beginning(data)
        text = generate(
            model,
            data.tokenizer,
            prompt,
            new_tokens=60,
            seq_len=args.batches.seq_len,
            device=device,
        )
        sample = prompt, text
        log.say(f"\n{text}")
    if log.enabled:
        floors = baselines(data.train[:COUNTED], data.valid, data.vocab_size)
        log.say("\nvalidation loss, nats per token:")
        for name, nats in {**floors, "this model": valid_loss}.items():
            log.say(f"  {name:10s} {nats:.3f}")
        path = write_report(
            args.logging.out,
            log.records,
            title=f"{args.model.name} on {args.data.source}",
            baselines={name: floors[name] for name in ("unigram", "bigram")},
            facts={name.capitalize(): _flat(values) for name, values in log.notes.items()},
            sample=sample,
        )
        log.say(f"\nreport: {path}")
    if args.model.export is not None:
        ptx.save_hf(
            model,
            args.model.export,
            tokenizer=tokenizer if data.tokenizer is not None else None,
            dtype=DTYPES[args.model.export_dtype],
        )
        log.say(f"exported to {args.model.export}")
    log.close()


def beginning(data: Data) -> str:
    """The first tokens that were held out, or a word where they are no text."""
    assert data.tokenizer is not None
    return str(data.tokenizer.decode(data.valid[:BEGINNING].tolist())).strip() or "The"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of arguments in one table, of which each name is in one."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat
