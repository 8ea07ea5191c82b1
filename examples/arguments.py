"""The arguments of train.py, and a check of them before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ptx
from data import CORPUS
from losses import LossName


@dataclass
class Args:
    """Train on the State of the Union addresses of 1790 to 2021."""

    model: str = "debug"
    """Preset: debug, s, m, l, xl, ... (ptx.preset); the vocabulary is the tokenizer's."""
    steps: int = 600
    """Optimizer steps."""
    global_batch: int = 16
    """Samples per step, over all ranks: the same samples on any number of ranks."""
    seq_len: int = 256
    """Tokens per sample."""
    lr: float = 3e-3
    """Peak learning rate, after the warm-up; falls to a tenth by a cosine."""
    warmup: int = 50
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of parameters and activations in forward and backward; master weights and sums stay fp32."""
    loss: LossName = "fused-linear"
    """How the loss is computed: with the head in one, never holding all logits, or from logits."""
    seed: int = 0

    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: int = -1
    """Ranks that shard one replica (FSDP2); -1: all that are left."""
    tp: int = 1
    """Ranks that share each matrix (tensor and sequence parallel)."""
    reshard_after_forward: bool = True
    """True: ZeRO-3, parameters are gathered again for the backward; False: ZeRO-2."""

    ac: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing of the blocks: recompute all of a block, or what is cheap."""
    compile: bool = False
    """Compile the blocks (torch.compile)."""
    grad_accum: int = 1
    """Micro-batches that a rank's share of the global batch is computed in."""

    ckpt_dir: Path | None = None
    """Where checkpoints go; a run goes on from the newest there, on any mesh. SIGTERM saves too."""
    save_interval: int = 200
    """Steps between checkpoints; the last step always makes one. 0: only that."""
    keep: int = 3
    """How many checkpoints to keep."""
    resume: bool = True
    """Whether to go on from a checkpoint that is there."""

    log_every: int = 10
    valid_every: int = 200
    """Steps between validations; the last step always is one."""
    valid_batches: int = 0
    """How many batches of the held-out text to validate on; 0: all of it."""
    out: Path = Path("runs/train")
    """Where metrics.jsonl and loss.png go."""
    corpus: Path = CORPUS
    """Text to train on, one document a line (corpus/SOURCE.md)."""
    cache: Path = Path(".cache/ptx")
    """Where the tokenised corpus is kept."""
    prompt: str = "Fellow citizens of the Senate and of the House of Representatives:"
    """What the trained model continues."""


def check(args: Args) -> None:
    """Raises ValueError with all that can't work: on every rank, before any of them waits."""
    world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    wrong = [
        f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be at least 1"
        for name in (
            "steps",
            "global_batch",
            "seq_len",
            "grad_accum",
            "log_every",
            "valid_every",
            "keep",
        )
        if getattr(args, name) < 1
    ]
    fixed = args.tp * args.dp_replicate
    if args.tp < 1 or args.dp_replicate < 1 or world % fixed:
        wrong.append(
            f"--tp {args.tp} x --dp-replicate {args.dp_replicate} must divide {world} ranks"
        )
    elif not wrong:
        shards = world // fixed if args.dp_shard == -1 else args.dp_shard
        data_ranks = args.dp_replicate * shards
        if data_ranks * args.tp != world:
            wrong.append(
                f"--dp-shard {shards} x {fixed} isn't the number of ranks, {world}; try -1"
            )
        if data_ranks < 1 or args.global_batch % (data_ranks * args.grad_accum):
            wrong.append(
                f"--global-batch {args.global_batch} must be a multiple of {data_ranks} data ranks x"
                f" {args.grad_accum} micro-batches"
            )
        if args.seq_len % args.tp:
            wrong.append(f"--seq-len {args.seq_len} must be a multiple of --tp {args.tp}")
    try:
        ptx.preset(args.model)
    except ValueError as error:
        wrong.append(str(error))
    if not args.corpus.is_file():
        wrong.append(f"--corpus {args.corpus} is no file")
    for folder in (args.out, args.cache):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(["", *(f"  {reason}" for reason in wrong)]))
