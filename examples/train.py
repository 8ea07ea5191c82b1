"""Train a Llama-style model on real text; one file for one process and for any dp x tp mesh.

python examples/train.py
torchrun --nproc-per-node 4 examples/train.py --tp 2
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import ptx
from baselines import baselines
from data import CORPUS, Tokens, TrainBatches, load_corpus, validation_batches
from generate import generate
from metrics import RunLog


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

    log_every: int = 10
    valid_every: int = 200
    """Steps between validations; the last step always is one."""
    out: Path = Path("runs/train")
    """Where metrics.jsonl and loss.png go."""
    corpus: Path = CORPUS
    """Text to train on, one document a line (corpus/SOURCE.md)."""
    cache: Path = Path(".cache/ptx")
    """Where the tokenised corpus is kept."""
    prompt: str = "Fellow citizens of the Senate and of the House of Representatives:"
    """What the trained model continues."""


def main(args: Args) -> None:
    mesh = ptx.build_mesh(dp_replicate=args.dp_replicate, dp_shard=args.dp_shard, tp=args.tp)
    device = torch.device(mesh.device_type)
    log = RunLog(args.out, args.steps, enabled=dist.get_rank() == 0)

    corpus = load_corpus(args.cache, corpus=args.corpus)
    vocab_size = corpus.tokenizer.get_vocab_size()
    data = ptx.data_mesh(mesh)
    batches = TrainBatches(
        corpus.train, args.seq_len, args.global_batch, data.get_local_rank(), data.size(), args.seed
    )

    model_args = replace(ptx.preset(args.model), vocab_size=vocab_size, max_seq_len=args.seq_len)
    with torch.device("meta"):
        model = ptx.Transformer(model_args)
    ptx.apply_tp(model, mesh["tp"])
    if args.ac != "none":
        ptx.apply_ac(model, args.ac)
    if args.compile:
        ptx.apply_compile(model)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ptx.apply_fsdp2(
        model,
        ptx.fsdp_mesh(mesh),
        mp_policy=bf16 if args.dtype == "bf16" else MixedPrecisionPolicy(),
        reshard_after_forward=args.reshard_after_forward,
    )
    ptx.materialize(model, device, seed=args.seed)

    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args))

    parameters = sum(p.numel() for p in model.parameters())
    log.say(f"{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} processes")
    losses = ptx.loss_mesh(mesh)
    tokens_per_step = args.global_batch * args.seq_len
    logged_at, logged_step = time.perf_counter(), 0

    for step, (tokens, labels) in enumerate(islice(batches, args.steps), 1):
        tokens, labels = tokens.to(device), labels.to(device)
        micro_batches = list(zip(tokens.chunk(args.grad_accum), labels.chunk(args.grad_accum)))
        scale = ptx.token_scale(labels, losses)
        mean_loss = torch.zeros((), device=device)
        for i, (inputs, targets) in enumerate(micro_batches, 1):
            with ptx.accumulate_grads(model, last=i == len(micro_batches)):
                loss = ptx.cross_entropy(model(inputs), targets, reduction="sum") * scale
                loss.backward()
            mean_loss += loss.detach()

        logged = step % args.log_every == 0 or step in (1, args.steps)
        stats = ptx.model_stats(model).flat() if logged else {}
        norm = ptx.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        if logged:
            dist.all_reduce(mean_loss, dist.ReduceOp.AVG, losses.get_group())
            seconds = (time.perf_counter() - logged_at) / (step - logged_step)
            logged_at, logged_step = time.perf_counter(), step
            log.step(
                {
                    "train/iter": step,
                    "train/loss": mean_loss.item(),
                    "train/dt": seconds,
                    "train/tps": tokens_per_step / seconds,
                    "train/tokens_seen": step * tokens_per_step,
                    "grad/norm_preclip": norm.item(),
                    "opt/lr": float(lr),
                    **stats,
                    **ptx.memory_report(device).flat(),
                }
            )
        if step % args.valid_every == 0 or step == args.steps:
            valid_loss = validate(model, corpus.valid, args, mesh)
            log.say(f"step {step:5d}/{args.steps}  validation loss {valid_loss:.4f}")
            log.record({"train/tokens_seen": step * tokens_per_step, "valid/loss": valid_loss})
            logged_at, logged_step = time.perf_counter(), step  # validation isn't training speed

    text = generate(
        model, corpus.tokenizer, args.prompt, new_tokens=60, seq_len=args.seq_len, device=device
    )
    floors = baselines(corpus.train, corpus.valid, vocab_size)
    log.say(f"\n{text}\n\nvalidation loss, nats per token:")
    for name, nats in {**floors, args.model: valid_loss}.items():
        log.say(f"  {name:10s} {nats:.3f}")
    log.plot({name: floors[name] for name in ("unigram", "bigram")})
    log.close()


def lr_factor(step: int, args: Args) -> float:
    """Linear warm-up, then a cosine from 1 to 0.1."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def validate(model: nn.Module, tokens: Tokens, args: Args, mesh: DeviceMesh) -> float:
    """Mean loss over the held-out tokens, each counted once."""
    data = ptx.data_mesh(mesh)
    loss_sum = torch.zeros((), device=mesh.device_type)
    count = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
    for inputs, labels in validation_batches(
        tokens, args.seq_len, args.global_batch, data.get_local_rank(), data.size()
    ):
        inputs, labels = inputs.to(mesh.device_type), labels.to(mesh.device_type)
        loss_sum += ptx.cross_entropy(model(inputs), labels, reduction="sum")
        count += (labels != -100).sum()
    return ptx.token_mean(loss_sum, count, ptx.loss_mesh(mesh)).item()


if __name__ == "__main__":
    main(tyro.cli(Args))
