"""Train a Llama-style model on real text; one file for one process and for any dp x tp mesh.

python examples/train.py
torchrun --nproc-per-node 4 examples/train.py --tp 2
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
import tyro
from torch.distributed.fsdp import MixedPrecisionPolicy

import ptx
from arguments import Args, check
from baselines import baselines
from checkpoints import Saves
from data import TrainBatches, load_corpus, validation_batches
from evaluation import validate
from generate import generate
from losses import make_loss
from metrics import RunLog
from schedule import lr_factor


def main(args: Args) -> None:
    started = time.perf_counter()
    check(args)
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
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, warmup=args.warmup, steps=args.steps)
    )
    loss_sum = make_loss(args.loss, mesh, vocab_size)

    sample = torch.zeros(args.global_batch, args.seq_len, dtype=torch.int64)
    flops = ptx.estimate_flops_fake(model, sample)  # of a step, on all ranks together
    peak = ptx.peak_flops(dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    tokens_per_step = sample.numel()
    losses = ptx.loss_mesh(mesh)
    parameters = sum(p.numel() for p in model.parameters())

    state = ptx.train_state(model, optimizer, schedule=schedule, data=batches)
    with Saves(args.ckpt_dir, args.save_interval, args.keep) as saves:
        start = saves.resume(state) if args.resume else 0
        log.open(start, start * tokens_per_step)
        log.say(f"{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} processes")
        if start:
            log.say(f"going on after step {start}")
        logged_at, logged_step, valid_loss = time.perf_counter(), start, math.nan

        for step, (tokens, labels) in enumerate(islice(batches, args.steps - start), start + 1):
            tokens, labels = tokens.to(device), labels.to(device)
            micro_batches = list(zip(tokens.chunk(args.grad_accum), labels.chunk(args.grad_accum)))
            scale = ptx.token_scale(labels, losses)
            mean_loss = torch.zeros((), device=device)
            for i, (inputs, targets) in enumerate(micro_batches, 1):
                with ptx.accumulate_grads(model, last=i == len(micro_batches)):
                    loss = loss_sum(model, inputs, targets) * scale
                    loss.backward()
                mean_loss += loss.detach()

            logged = step % args.log_every == 0 or step in (start + 1, args.steps)
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
                speed = ptx.throughput(
                    flops, tokens_per_step, seconds, devices=dist.get_world_size(), peak=peak
                )
                log.step(
                    {
                        "train/iter": step,
                        "train/loss": mean_loss.item(),
                        "train/dt": seconds,
                        "train/tokens_seen": step * tokens_per_step,
                        "grad/norm_preclip": norm.item(),
                        "opt/lr": float(lr),
                        **speed.flat(),
                        **stats,
                        **ptx.memory_report(device).flat(),
                    }
                )
            if step % args.valid_every == 0 or step == args.steps:
                held_out = validation_batches(
                    corpus.valid,
                    args.seq_len,
                    args.global_batch,
                    data.get_local_rank(),
                    data.size(),
                )
                held_out = islice(held_out, args.valid_batches or None)
                valid_loss = validate(model, held_out, loss_sum, mesh)
                log.say(f"step {step:5d}/{args.steps}  validation loss {valid_loss:.4f}")
                log.record({"train/tokens_seen": step * tokens_per_step, "valid/loss": valid_loss})
                logged_at, logged_step = time.perf_counter(), step  # that isn't training speed

            if cost := saves.after(step, state, last=step == args.steps):
                log.record({"train/tokens_seen": step * tokens_per_step, **cost})
            if start and step == start + 1:
                restart = {"train/restart_seconds": time.perf_counter() - started}
                log.record({"train/tokens_seen": step * tokens_per_step, **restart})
            if saves.stopping:
                log.say(f"stopped after step {step}, saved")
                return log.close()

    text = generate(
        model, corpus.tokenizer, args.prompt, new_tokens=60, seq_len=args.seq_len, device=device
    )
    floors = baselines(corpus.train, corpus.valid, vocab_size)
    log.say(f"\n{text}\n\nvalidation loss, nats per token:")
    for name, nats in {**floors, args.model: valid_loss}.items():
        log.say(f"  {name:10s} {nats:.3f}")
    log.plot({name: floors[name] for name in ("unigram", "bigram")})
    log.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
