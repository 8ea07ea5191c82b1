"""The same wrapping twice: by ptx, and by hand with plain torch, as in torch's own tutorials."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ptx


def build(args: ptx.ModelArgs) -> ptx.Transformer:
    torch.manual_seed(0)
    return ptx.Transformer(args)


def wrap_by_ptx(model: ptx.Transformer, mesh: DeviceMesh) -> nn.Module:
    ptx.apply_tp(model, mesh["tp"])
    return ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))


def wrap_by_hand(model: ptx.Transformer, mesh: DeviceMesh) -> nn.Module:
    # Of this embedding, whose output still waits for its reduce-scatter; with ptx it has arrived.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    if mesh["tp"].size() > 1:
        _parallelize_by_hand(model, mesh["tp"])
    dp = ptx.fsdp_mesh(mesh)
    fully_shard(model.tok_embeddings, mesh=dp)
    for block in model.layers.values():
        fully_shard(block, mesh=dp)
    fully_shard(model.output, mesh=dp, reshard_after_forward=False)
    return fully_shard(model, mesh=dp)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
) -> None:
    ptx.cross_entropy(model(tokens), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def _parallelize_by_hand(model: ptx.Transformer, tp: DeviceMesh) -> None:
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
