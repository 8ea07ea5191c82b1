"""Arguments of train.py that can't work are refused, all at once, before anything is started."""

from __future__ import annotations

import os
import sys
import time

from arguments import Args
from data import kind_of
from models import check_model
from trackers import missing_packages

AFTER_RANK_0 = 10.0  # seconds, in which torchrun ends the other ranks, as one has ended


def refuse(args: Args) -> Args:
    """``args``, if they can work; else the process ends with the reasons, without a stack."""
    try:
        check(args)
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # one message of each host will do
            time.sleep(AFTER_RANK_0)
        print(f"train.py can't start:{error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return args


def check(args: Args) -> None:
    """Raises ValueError with all that can't work: on every rank, before any of them waits."""
    world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    at_least_1 = {
        **{name: getattr(args.batches, name) for name in ("global_batch", "seq_len", "grad_accum")},
        **{name: getattr(args.logging, name) for name in ("log_every", "valid_every")},
        "keep": args.saving.keep,
    }
    if not args.optim.tokens:
        at_least_1["steps"] = args.optim.steps
    at_least_0 = {
        **{name: getattr(args.optim, name) for name in ("tokens", "warmup", "loss_chunk")},
        **{name: getattr(args.optim, name) for name in ("max_grad_norm", "skip_patience")},
        "save_interval": args.saving.save_interval,
        "valid_batches": args.logging.valid_batches,
        "watchdog": args.saving.watchdog,
    }
    wrong = [
        f"--{name.replace('_', '-')} is {value}, it must be at least {least}"
        for least, values in ((1, at_least_1), (0, at_least_0))
        for name, value in values.items()
        if value < least
    ]
    wrong += _wrong_degrees(args, world) if not wrong else []
    wrong += [*check_model(args.model), *missing_packages(args.logging.trackers)]
    try:
        kind = kind_of(args.data.source)
        if kind == "corpus" and not args.data.corpus.is_file():
            wrong.append(f"--corpus {args.data.corpus} is no file")
        if kind in ("random", "mnist") and args.batches.document_mask:
            wrong.append(f"--document-mask: {args.data.source} has no documents")
    except ValueError as error:
        wrong.append(str(error))
    if "://" in str(args.saving.ckpt_dir) and args.saving.stage_dir is None:
        wrong.append(f"--ckpt-dir {args.saving.ckpt_dir} is a URL, which needs a --stage-dir")
    if args.saving.ckpt_dir is None and (args.saving.keep_every or args.saving.stage_dir):
        wrong.append("--keep-every and --stage-dir are for --ckpt-dir, which isn't given")
    if args.model.export is not None and args.model.export.exists():
        wrong.append(f"--export {args.model.export} is there already; name a new folder")
    for folder in (args.logging.out, args.batches.cache):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(["", *(f"  {reason}" for reason in wrong)]))


def _wrong_degrees(args: Args, world: int) -> list[str]:
    degrees, batches = args.parallel, args.batches
    fixed = degrees.tp * degrees.dp_replicate
    if degrees.tp < 1 or degrees.dp_replicate < 1 or world % fixed:
        return [
            f"--tp {degrees.tp} x --dp-replicate {degrees.dp_replicate} must divide {world} ranks"
        ]
    wrong = []
    shards = world // fixed if degrees.dp_shard == -1 else degrees.dp_shard
    data_ranks = degrees.dp_replicate * shards
    if data_ranks * degrees.tp != world:
        wrong.append(f"--dp-shard {shards} x {fixed} isn't the number of ranks, {world}; try -1")
    if data_ranks < 1 or batches.global_batch % (data_ranks * batches.grad_accum):
        wrong.append(
            f"--global-batch {batches.global_batch} must be a multiple of {data_ranks} data ranks x"
            f" {batches.grad_accum} micro-batches"
        )
    if batches.seq_len % degrees.tp:
        wrong.append(f"--seq-len {batches.seq_len} must be a multiple of --tp {degrees.tp}")
    return wrong
