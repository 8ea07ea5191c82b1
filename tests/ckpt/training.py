"""A small training run on any mesh, with all that makes checkpoints hard; and what to compare of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ptx
from ptx.ckpt import train_state

MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "dp2": {"dp_shard": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "dp4": {"dp_shard": 4},
}
# 61 rows split unevenly over 2 and 4 ranks.
ARGS = ptx.ModelArgs(
    vocab_size=61,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=48,
    max_seq_len=16,
    tie_embeddings=True,
)
BATCH, SEQ = 8, 12


def world_size(mesh: str) -> int:
    return torch.Size(MESHES[mesh].values()).numel()


class Stream:
    """A loader addressed by samples consumed, as the example's: any mesh sees the same batches."""

    def __init__(self, mesh: DeviceMesh) -> None:
        data = ptx.data_mesh(mesh)
        self.rank, self.ranks, self.consumed = data.get_local_rank(), data.size(), 0
        self.seen: list[int] = []  # ids of the global batches' samples

    def __next__(self) -> Tensor:
        first, self.consumed = self.consumed, self.consumed + BATCH
        self.seen += range(first, self.consumed)
        rows = range(first, self.consumed)[self.rank * BATCH // self.ranks :][: BATCH // self.ranks]
        draws = [torch.randint(61, (SEQ + 1,), generator=_generator(row)) for row in rows]
        return torch.stack(draws)

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Run:
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: Stream
    dropout: float = 0.0
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def train(self, steps: int) -> None:
        loss_mesh = ptx.loss_mesh(self.mesh)
        for _ in range(steps):
            tokens = next(self.data)
            inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
            scale = ptx.token_scale(labels, loss_mesh)
            hidden = F.dropout(self.model(inputs, return_hidden=True), self.dropout)
            loss = ptx.fused_linear_ce(hidden, self.model.output, labels, reduction="sum") * scale
            loss.backward()
            ptx.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            torch.distributed.all_reduce(
                total, torch.distributed.ReduceOp.AVG, loss_mesh.get_group()
            )
            self.losses.append(total.item())


def start(mesh_name: str, *, seed: int = 0, dim: int = ARGS.dim) -> Run:
    """A run at step 0 on every rank of a world of `world_size(mesh_name)`.

    Tied embedding and head, uneven rows, a frozen parameter, one that is never used, a buffer.
    """
    mesh = ptx.build_mesh(**MESHES[mesh_name], device_type="cpu")
    torch.manual_seed(seed)
    model = ptx.Transformer(replace(ARGS, dim=dim))
    ptx.apply_tp(model, mesh["tp"])
    model.register_parameter("spare", nn.Parameter(torch.randn(7, 3)))
    model.register_buffer("count", torch.arange(3.0) + seed)
    model.layers["0"].attention_norm.weight.requires_grad_(False)
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    run = Run(mesh, model, optimizer, schedule, Stream(mesh))
    run.state = train_state(model, optimizer, schedule=schedule, data=run.data)
    return run


def freeze_late(run: Run) -> None:
    """A parameter that has optimizer state, and trains no more."""
    run.model.layers["1"].ffn_norm.weight.requires_grad_(False)


def full_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of model and optimizer, whole; a collective."""
    found: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        elif isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = whole.detach().clone()

    for key in ("model", "optimizer"):
        walk(state[key].state_dict(), key)
    return found


def options(run: Run) -> list[dict[str, Any]]:
    """The optimizer's options and the schedule's state."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    return [*groups, run.schedule.state_dict()]


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
