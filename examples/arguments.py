"""The arguments of train.py, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import arg

from data import CORPUS, HOLD_OUT
from losses import LossName
from sources import TextUnit
from trackers import TrackerName


@dataclass
class Model:
    """What is trained."""

    name: Annotated[str, arg(name="model")] = "debug"
    """Preset (debug, s, m, l, xl, ...), with the vocabulary of the data; or a pretrained model: a folder
    or org/name on the Hugging Face hub, with its own vocabulary and tokenizer."""
    model_revision: str | None = None
    """Branch, tag or commit of a pretrained model on the hub."""
    dim: int | None = None
    """Of a preset: width; as all below, instead of the preset's."""
    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    vocab_size: int | None = None
    """More entries than the data has: the others are padding."""
    tie_embeddings: bool | None = None
    export: Path | None = None
    """New folder for the trained model, as transformers reads it."""
    export_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the exported weights."""


@dataclass
class Source:
    """Where the data is from."""

    source: Annotated[str, arg(name="data")] = "corpus"
    """corpus (the State of the Union addresses of 1790 to 2021), random, mnist:FOLDER, text, JSON lines
    or parquet (file, folder or glob), or org/name, a dataset of the Hugging Face hub."""
    valid_data: str | None = None
    """Files of text that are held out, instead of a part of --data."""
    hold_out: int = HOLD_OUT
    """Else every so many documents one is held out."""
    column: str = "text"
    """Where the text is in JSON lines and parquet."""
    text_unit: TextUnit = "file"
    """What a document is in text files."""
    data_limit: int = 0
    """Documents (images) to read at most; 0: all."""
    split: str = "train"
    """Of a dataset of the hub."""
    valid_split: str | None = None
    """Of a dataset of the hub, to be held out."""
    hub_files: str | None = None
    """Glob of the dataset's files, instead of a split."""
    data_revision: str | None = None
    """Branch, tag or commit of the dataset."""
    end_of_text: str | None = None
    """Token that ends a document; the tokenizer's own if not given."""
    bos: bool = False
    """Begin each document with the tokenizer's beginning-of-sequence token."""
    corpus: Path = CORPUS
    """File of --data corpus, in the form of corpus/SOURCE.md."""
    random_vocab: int = 4096
    """Vocabulary of --data random."""


@dataclass
class Batches:
    """How the data becomes steps."""

    global_batch: int = 16
    """Samples per step, over all ranks: the same samples on any number of ranks."""
    seq_len: int = 256
    """Tokens per sample."""
    grad_accum: int = 1
    """Micro-batches that a rank's share of the global batch is computed in."""
    document_mask: bool = False
    """Tokens attend to their own document only, of several in a sample."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or org/name; the pretrained model's, or that of the corpus, if not given."""
    cache: Path = Path(".cache/ptx")
    """Where tokens are kept."""
    seed: int = 0
    """Decides the initial weights and the order of the samples."""


@dataclass
class Optim:
    """How it is trained."""

    steps: int = 600
    """Optimizer steps."""
    tokens: int = 0
    """Train on so many tokens, instead of --steps."""
    lr: float = 3e-3
    """Peak learning rate, after the warm-up; falls to a tenth by a cosine."""
    warmup: int = 50
    """Steps of linear warm-up."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; norms, biases and embeddings don't decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0: not at all."""
    skip_patience: int = 10
    """End after so many steps in a row whose gradients aren't finite, and are skipped; 0: never."""
    loss: LossName = "fused-linear"
    """How the loss is computed: with the head in one, never holding all logits, or from logits."""
    loss_chunk: int = 0
    """Tokens per chunk of a chunked or fused loss; 0: by the shapes."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of parameters and activations in forward and backward; master weights and sums stay fp32."""


@dataclass
class Parallel:
    """How it is spread over ranks."""

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
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's."""


@dataclass
class Saving:
    """What outlives a crash."""

    ckpt_dir: str | None = None
    """Where checkpoints go; a run goes on from the newest there, on any mesh. SIGTERM and
    Ctrl-C save too. A folder, or a URL that fsspec knows (with --stage-dir)."""
    save_interval: int = 200
    """Steps between checkpoints; the last step always makes one. 0: only that."""
    keep: int = 3
    """How many checkpoints to keep."""
    keep_every: int | None = None
    """Keep the steps that this divides as well."""
    stage_dir: Path | None = None
    """Fast folder of this node that is written first, and copied from in the background."""
    resume: bool = True
    """Whether to go on from a checkpoint that is there."""
    watchdog: float = 0.0
    """End a rank after so many seconds in which nothing moved, so that torchrun restarts; 0: never."""


@dataclass
class Logging:
    """What it leaves behind."""

    out: Path = Path("runs/train")
    """Where metrics.jsonl, report.md and its pictures go."""
    log_every: int = 10
    """Steps between lines and records."""
    valid_every: int = 200
    """Steps between validations; the last step always is one."""
    valid_batches: int = 0
    """How many batches of the held-out data to validate on; 0: all of it."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides."""
    histograms: bool = False
    """Write histograms of parameters, gradients and activations with each validation."""
    prompt: str | None = None
    """What the trained model continues; if not given, how the held-out text begins."""


@dataclass
class Profiling:
    """Where time and memory go."""

    profile: bool = False
    """Run torch.profiler: a trace and a table per rank in <out>/profile."""
    wait: Annotated[int, arg(name="profile-wait")] = 1
    """Steps of each cycle that aren't recorded."""
    warmup: Annotated[int, arg(name="profile-warmup")] = 2
    """Then steps that are thrown away."""
    active: Annotated[int, arg(name="profile-active")] = 3
    """Then steps that are kept."""
    repeat: Annotated[int, arg(name="profile-repeat")] = 5
    """Cycles; 0: to the end."""
    rank_zero_only: bool = False
    """Profile rank 0 alone."""
    pyinstrument: bool = False
    """Sample the Python stack of the whole run."""
    memory: Annotated[bool, arg(name="profile-memory")] = True
    """Record allocations, in the trace."""
    shapes: Annotated[bool, arg(name="profile-shapes")] = True
    stack: Annotated[bool, arg(name="profile-stack")] = False
    flops: Annotated[bool, arg(name="profile-flops")] = True
    modules: Annotated[bool, arg(name="profile-modules")] = False
    snapshot: Annotated[bool, arg(name="memory-snapshot")] = False
    """Keep the accelerator's last allocations."""


@dataclass
class Args:
    """Train a Llama-style model, on one process or any dp x tp mesh of them."""

    model: Model = field(default_factory=Model)
    data: Source = field(default_factory=Source)
    batches: Batches = field(default_factory=Batches)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    saving: Saving = field(default_factory=Saving)
    logging: Logging = field(default_factory=Logging)
    profiling: Profiling = field(default_factory=Profiling)


def parse(argv: Sequence[str] | None = None) -> Args:
    """The command line's, or ``argv``'s; exits with a message if it has what there isn't."""
    return tyro.cli(Args, args=argv, config=(tyro.conf.OmitArgPrefixes,))
