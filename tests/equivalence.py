"""The table that ptx stands for: every mesh against one process, for losses, gradients and trained weights.

``python tests/equivalence.py`` (``make equivalence``) prints it; tests/test_equivalence.py holds it to its bounds.

Each cell trains the same small model three steps on the same global batch, with ragged ignored tokens and whole
samples without a valid one, so that some data ranks and micro-batches have nothing to learn from. The reference is
plain torch: the unwrapped model, ``F.cross_entropy`` of the whole batch, torch's own clipping and optimizers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import ptx

MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "dp_shard 2": {"dp_shard": 2},
    "dp_shard 4": {"dp_shard": 4},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "HSDP 2 x 1 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}


@dataclass(frozen=True)
class Variant:
    """One model; the fields are those of ModelArgs that it changes."""

    tie_embeddings: bool = False
    n_kv_heads: int = 4
    sequence_parallel: bool = True
    transformers: bool = False


VARIANTS = {
    "untied": Variant(),
    "tied": Variant(tie_embeddings=True),
    "untied, no SP": Variant(sequence_parallel=False),
    "tied, no SP": Variant(tie_embeddings=True, sequence_parallel=False),
    "1 kv head": Variant(n_kv_heads=1),
    "1 kv head, no SP": Variant(n_kv_heads=1, sequence_parallel=False),
    "transformers": Variant(transformers=True),
    "transformers, tied": Variant(transformers=True, tie_embeddings=True),
}


@dataclass(frozen=True)
class Execution:
    """How a step is computed, which must not change what it computes."""

    ac: Literal["full", "selective"] | None = None
    backend: str | None = None  # of torch.compile
    micro_batches: int = 1
    reduce: Literal["last", "every"] = "last"

    def __str__(self) -> str:
        compiled = self.backend or "eager"
        return f"AC {self.ac or 'none'}, {compiled}, {self.micro_batches} x {self.reduce}"


PLAIN = Execution()
EXECUTIONS = [
    Execution(ac, backend, n, reduce)
    for ac in (None, "full", "selective")
    for backend in (None, "aot_eager")
    for n, reduce in ((1, "last"), (3, "last"), (3, "every"))
]

DIM, LAYERS, HEADS, HIDDEN, VOCAB = 64, 2, 8, 96, 61  # 61 rows split unevenly over 2 and 4
BATCH, SEQ, STEPS, SEED, MAX_NORM = 12, 16, 3, 7, 0.5
OPTIMIZERS = ("sgd", "adamw")


@dataclass
class Outcome:
    """What one training of STEPS steps gave; the same on every rank."""

    weights_hash: str  # of the initial weights
    loss: float
    gradients: dict[str, Tensor]
    norms: list[float]  # global gradient norm of each step
    weights: dict[str, dict[str, Tensor]]  # by optimizer, after the last step


def world_size(mesh: str) -> int:
    sizes = MESHES[mesh].values()
    return torch.Size(sizes).numel()


def train_on_mesh(
    mesh_name: str,
    cells: list[tuple[str, Execution]],
    bf16: bool = False,
    optimizers: tuple[str, ...] = OPTIMIZERS,
) -> list[Outcome]:
    """What a user writes; runs on every rank of an initialised world, for each (variant, execution)."""
    mesh = ptx.build_mesh(**MESHES[mesh_name], device_type="cpu")
    return [_train_on_mesh(mesh, VARIANTS[name], how, bf16, optimizers) for name, how in cells]


def _train_on_mesh(
    mesh: DeviceMesh, variant: Variant, how: Execution, bf16: bool, optimizers: tuple[str, ...]
) -> Outcome:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    data, losses = ptx.data_mesh(mesh), ptx.loss_mesh(mesh)

    def build(variant: Variant) -> nn.Module:
        model = meta_model(variant)
        plan = ptx.tp_plan(model, sequence_parallel=variant.sequence_parallel)
        ptx.apply_tp(model, mesh["tp"], plan)
        if how.ac:
            ptx.apply_ac(model, how.ac)
        if how.backend:
            ptx.apply_compile(model, backend=how.backend)
        ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh), mp_policy=policy)
        return ptx.materialize(model, "cpu", seed=SEED)

    def backward(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        mine = slice_of(data.get_local_rank(), data.size())
        window = list(
            zip(tokens[mine].chunk(how.micro_batches), labels[mine].chunk(how.micro_batches))
        )
        scale = ptx.token_scale([part for _, part in window], losses)
        total = torch.zeros(())
        for i, (inputs, targets) in enumerate(window, 1):
            with ptx.accumulate_grads(model, last=i == len(window), reduce=how.reduce):
                loss = ptx.cross_entropy(logits_of(model, inputs), targets, reduction="sum") * scale
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG, losses.get_group())
        return total

    def clip(model: nn.Module) -> Tensor:
        return ptx.clip_grad_norm_(model.parameters(), MAX_NORM)

    return _train(build, backward, clip, variant, optimizers)


def train_plainly(variant: Variant, dtype: torch.dtype = torch.float32) -> Outcome:
    """The reference: no mesh, no wrapper, no ptx but for the initial weights."""

    def build(variant: Variant) -> nn.Module:
        return ptx.materialize(meta_model(variant), "cpu", seed=SEED).to(dtype)

    def backward(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = logits_of(model, tokens).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach()

    def clip(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return _train(build, backward, clip, variant, OPTIMIZERS)


def difference(got: Outcome, want: Outcome) -> dict[str, float]:
    """The largest relative differences, per kind of number: max|difference| / max|reference| of a tensor."""
    worst = {
        "loss": abs(got.loss - want.loss) / abs(want.loss),
        "gradients": _worst(got.gradients, want.gradients),
        "norms": max(abs(g - w) / w for g, w in zip(got.norms, want.norms, strict=True)),
    }
    for name, weights in got.weights.items():
        worst[name] = _worst(weights, want.weights[name])
    return worst


def gradient_distance(got: Outcome, want: Outcome) -> float:
    """Relative distance of all gradients, taken as one vector."""
    assert got.gradients.keys() == want.gradients.keys()
    square = sum(float((got.gradients[k] - g).square().sum()) for k, g in want.gradients.items())
    return (square / sum(float(g.square().sum()) for g in want.gradients.values())) ** 0.5


def meta_model(variant: Variant) -> nn.Module:
    with torch.device("meta"):
        if variant.transformers:
            from transformers import LlamaConfig, LlamaForCausalLM

            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=DIM,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS,
                    num_key_value_heads=variant.n_kv_heads,
                    intermediate_size=HIDDEN,
                    vocab_size=VOCAB,
                    max_position_embeddings=SEQ,
                    tie_word_embeddings=variant.tie_embeddings,
                    pad_token_id=None,
                    use_cache=False,
                )
            )
        return ptx.Transformer(
            ptx.ModelArgs(
                dim=DIM,
                n_layers=LAYERS,
                n_heads=HEADS,
                n_kv_heads=variant.n_kv_heads,
                hidden_dim=HIDDEN,
                vocab_size=VOCAB,
                max_seq_len=SEQ,
                tie_embeddings=variant.tie_embeddings,
            )
        )


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    for sample in range(BATCH // 2):
        labels[sample, SEQ - 5 * sample :] = -100
    labels[
        BATCH // 2 :
    ] = -100  # the last of 2 data ranks, and the last two of 4, have no valid token
    labels[BATCH // 2 - 1, ::3] = -100
    return tokens, labels


def slice_of(rank: int, ranks: int) -> slice:
    size = BATCH // ranks
    return slice(rank * size, (rank + 1) * size)


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().float().clone()


def _train(
    build: Any, backward: Any, clip: Any, variant: Variant, optimizers: tuple[str, ...]
) -> Outcome:
    weights: dict[str, dict[str, Tensor]] = {}
    for name in optimizers:
        model = build(variant)
        initial = {key: full(p) for key, p in model.named_parameters()}
        digest = hashlib.sha256()
        for key, value in initial.items():
            digest.update(key.encode() + value.numpy().tobytes())
        optimizer: torch.optim.Optimizer
        if name == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        else:  # a large eps: the first steps of Adam are sign-like, and magnify what is near zero
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        losses, gradients, norms = [], {}, []
        for step in range(STEPS):
            losses.append(float(backward(model, *batch(step))))
            if step == 0:
                gradients = {key: full(p.grad) for key, p in model.named_parameters()}
            norms.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
        weights[name] = {key: full(p) for key, p in model.named_parameters()}
    return Outcome(digest.hexdigest(), losses[0], gradients, norms, weights)


def _worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(
        float((got[name] - value).abs().max() / value.abs().max()) for name, value in want.items()
    )


def main() -> None:
    import harness

    torch.set_num_threads(1)
    want = {name: train_plainly(variant) for name, variant in VARIANTS.items()}
    columns = ("loss", "gradients", "norms", *OPTIMIZERS)
    print(f"{'mesh':20s} {'model':20s} " + " ".join(f"{c:>10s}" for c in columns) + "  same init")
    cells = [(name, PLAIN) for name in VARIANTS]
    for mesh in MESHES:
        outcomes = harness.run(train_on_mesh, world_size(mesh), mesh, cells, timeout=300)[0]
        for (name, _), got in zip(cells, outcomes):
            worst = difference(got, want[name])
            same = got.weights_hash == want[name].weights_hash
            figures = " ".join(f"{worst[c]:10.1e}" for c in columns)
            print(f"{mesh:20s} {name:20s} {figures}  {'yes' if same else 'NO'}")


if __name__ == "__main__":
    import equivalence  # ranks find functions by module name, which is not "__main__"

    equivalence.main()
