"""Train a Llama-style model; one file for one process and for any dp x tp mesh.

python examples/train.py
torchrun --nproc-per-node 4 examples/train.py --tp 2
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import ptx
from arguments import Args, parse
from checkpoints import Saves
from checks import check, refuse
from data import TOKENIZER, TrainBatches, load_data, validation_batches
from evaluation import validate
from histograms import Activations
from losses import make_loss
from meter import Meter
from metrics import RunLog
from models import choose_model, find_pretrained
from optimizer import SkipNonFinite, make_adamw, steps_of
from precision import PrecisionProbe
from profiling import make_profiler
from schedule import lr_factor
from watchdog import Watchdog
from wrap_up import DTYPES, finish, note_histograms


def main(args: Args) -> None:
    started = time.perf_counter()
    check(args)
    batch, optim, degrees = args.batches, args.optim, args.parallel
    saving, logging = args.saving, args.logging
    mesh = ptx.build_mesh(
        dp_replicate=degrees.dp_replicate, dp_shard=degrees.dp_shard, tp=degrees.tp
    )
    device, rank, world = torch.device(mesh.device_type), dist.get_rank(), dist.get_world_size()
    readers, losses = ptx.data_mesh(mesh), ptx.loss_mesh(mesh)
    tokens_per_step = batch.global_batch * batch.seq_len
    steps = steps_of(optim.steps, optim.tokens, tokens_per_step)
    log = RunLog(
        logging.out, steps, enabled=rank == 0, trackers=logging.trackers, config=asdict(args)
    )

    pretrained = find_pretrained(args.model, mesh)
    tokenizer = batch.tokenizer or pretrained or TOKENIZER
    data = load_data(
        cache=batch.cache,
        tokenizer=tokenizer,
        seed=batch.seed,
        say=print,
        **vars(args.data),
    )
    batches = TrainBatches(
        data.train,
        batch.seq_len,
        batch.global_batch,
        readers.get_local_rank(),
        readers.size(),
        batch.seed,
        digest=data.digest,
    )

    model_args = choose_model(args.model, pretrained, data.vocab_size, batch.seq_len)
    with torch.device("meta"):
        model = ptx.Transformer(model_args)
    plan = ptx.tp_plan(model, whole_attention=not model_args.heads_split(degrees.tp))
    ptx.apply_tp(model, mesh["tp"], plan)
    if degrees.ac != "none":
        ptx.apply_ac(model, degrees.ac)
    if degrees.compile:
        ptx.apply_compile(model, mode=degrees.compile_mode)
    precision = MixedPrecisionPolicy(DTYPES[optim.dtype], reduce_dtype=torch.float32)
    ptx.apply_fsdp2(
        model,
        ptx.fsdp_mesh(mesh),
        mp_policy=precision,
        reshard_after_forward=degrees.reshard_after_forward,
    )
    if pretrained is None:
        ptx.materialize(model, device, seed=batch.seed)
    else:
        ptx.load_hf(model, pretrained)

    optimizer = make_adamw(
        model,
        optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, warmup=optim.warmup, steps=steps)
    )
    skip = SkipNonFinite(optim.skip_patience)
    loss_sum = make_loss(
        optim.loss,
        mesh,
        data.vocab_size if pretrained is None else model_args.vocab_size,
        chunk=optim.loss_chunk,
        end_id=data.end_id if batch.document_mask else None,
    )

    meter = Meter(model, mesh, batches, DTYPES[optim.dtype])
    probe = PrecisionProbe(model)
    activations = Activations(model) if logging.histograms else None
    state = ptx.train_state(model, optimizer, schedule=schedule, data=batches, skip=skip)
    watchdog = Watchdog(saving.watchdog, rank, world)
    profiler = make_profiler(logging.out / "profile", rank, **vars(args.profiling))
    saves = Saves(
        saving.ckpt_dir,
        saving.save_interval,
        saving.keep,
        keep_every=saving.keep_every,
        stage_dir=saving.stage_dir,
    )
    with watchdog, profiler, saves:
        start = saves.resume(state) if saving.resume else 0
        log.open(start, start * tokens_per_step)
        parameters = sum(p.numel() for p in model.parameters())
        processes = f"{world} process{'es' * (world > 1)}"
        log.say(f"{data.describe()}\n{parameters / 1e6:.1f} M parameters, {processes}")
        if start:
            log.say(f"going on after step {start}")
        valid_loss = math.nan

        todo = meter.start(islice(batches, max(0, steps - start)))
        for step, (tokens, labels) in enumerate(todo, start + 1):
            last, seen = step == steps, {"train/tokens_seen": float(step * tokens_per_step)}
            logged = step % logging.log_every == 0 or step == start + 1 or last
            tokens, labels = tokens.to(device), labels.to(device)
            micro_batches = list(
                zip(tokens.chunk(batch.grad_accum), labels.chunk(batch.grad_accum))
            )
            scale = ptx.token_scale(labels, losses)
            mean_loss = torch.zeros((), device=device)
            meter.look(logged)
            if activations:
                activations.on = step % logging.valid_every == 0 or last
            for i, (inputs, targets) in enumerate(micro_batches, 1):
                with ptx.accumulate_grads(model, last=i == len(micro_batches)):
                    with meter.part("forward"):
                        loss = loss_sum(model, inputs, targets) * scale
                    with meter.part("backward"):
                        loss.backward()
                mean_loss += loss.detach()

            if logged:
                meter.before_clipping()
            norm = ptx.clip_grad_norm_(model.parameters(), optim.max_grad_norm or math.inf)
            lr = schedule.get_last_lr()[0]
            skip.before_step(norm, optimizer, step)
            optimizer.step()
            schedule.step()
            if step == start + 1:
                log.note("precision", probe.summary(optimizer, loss))
            if activations and activations.on:
                note_histograms(log, step, model, activations, mesh)
            optimizer.zero_grad()

            if logged:
                log.step(
                    {
                        **meter.flat(step, mean_loss, tokens, labels),
                        "grad/norm_preclip": norm.item(),
                        "opt/lr": float(lr),
                        "opt/skipped": skip.skipped,
                    }
                )
            watchdog.beat(step)
            profiler.step()
            if step % logging.valid_every == 0 or last:
                held_out = validation_batches(
                    data.valid,
                    batch.seq_len,
                    batch.global_batch,
                    readers.get_local_rank(),
                    readers.size(),
                )
                held_out = islice(held_out, logging.valid_batches or None)
                with meter.paused(), watchdog.slow("validating"):
                    valid_loss = validate(model, held_out, loss_sum, mesh)
                log.say(f"step {step:5d}/{steps}  validation loss {valid_loss:.4f}")
                log.record({**seen, "valid/loss": valid_loss})
            with watchdog.slow("saving"):
                cost = saves.after(step, state, last=last)
            if start and step == start + 1:
                cost["train/restart_seconds"] = time.perf_counter() - started
            if cost:
                log.record(seen | cost)
            if saves.stopping:
                log.say(f"stopped after step {step}, saved; the same command goes on")
                return log.close()

    finish(args, model, data, log=log, valid_loss=valid_loss, tokenizer=tokenizer, device=device)


if __name__ == "__main__":
    main(refuse(parse()))
