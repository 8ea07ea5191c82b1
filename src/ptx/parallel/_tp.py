"""Shard a model's matrices over ranks, by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx._checks import refuse_where
from ptx._names import clean_named_modules
from ptx.parallel._order import require_before
from ptx.parallel._tp_check import check_plan, owned_parameters, ties
from ptx.parallel._tp_inputs import require_even_sequence
from ptx.parallel._tp_plan import tp_plan

M = TypeVar("M", bound=nn.Module)


def apply_tp(model: M, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle] | None = None) -> M:
    """Shards a model's matrices over the ranks of ``mesh``, in place.

    The whole plan is checked first: an error lists every violation and leaves the model as it was.
    Afterwards every parameter is a DTensor on ``mesh``. Tied weights stay tied, frozen ones frozen,
    and head counts in modules and configs stay the whole model's. With a plan of `tp_plan` logits
    are a DTensor ``Shard(-1)``, for any vocabulary size; the normed hidden state is a DTensor
    ``Shard(1)`` under sequence parallelism, else a plain tensor.

    Args:
        model: On meta, or real with any values: parameters and buffers become those of the first
            rank of ``mesh``.
        mesh: 1-D, ``mesh["tp"]``. Over one rank the plan is checked and nothing is changed.
        plan: Module glob -> ParallelStyle, one style a module; None: ``tp_plan(model)``.

    Returns:
        The same model.

    Raises:
        ValueError: The mesh isn't 1-D, or is a data dim of `build_mesh`; the model went through
            this or a later step already; a key matches nothing, or two match one module; a style
            doesn't fit its module; heads or features don't split; tied parameters would be sharded
            differently; no key covers a parameter; called with tokens that are no row of a split
            embedding. Under sequence parallelism, later: the model is called with a sequence that
            tp doesn't divide; every rank raises, before any communication over tp.

    Cost: a real model's parameters are sent from the first rank, a scatter or broadcast each; none
    on meta. In each block, forward and backward each take an all-gather and a reduce-scatter of
    [B, S, dim] around attention and around the feed-forward (sequence parallelism), or one
    all-reduce in place of each pair.

    Source: Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198.
    """
    require_before("apply_tp", model, "apply_fsdp2", "apply_ac / apply_compile", "apply_tp")
    dims = mesh.mesh_dim_names or mesh.shape
    if mesh.ndim != 1 or {*dims} & {"pp", "dp_replicate", "dp_shard", "cp"}:
        raise ValueError(
            f"apply_tp: the mesh has {mesh.ndim} dims {dims}; pass the 1-D mesh of the ranks that"
            ' share each matrix, mesh["tp"]'
        )
    if plan is None:
        plan = tp_plan(model)
    tp = mesh.size()
    styles, problems = check_plan(model, plan, tp)
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise ValueError(f"apply_tp: the plan doesn't fit {type(model).__name__}:{lines}")
    if tp > 1:
        _parallelize(model, mesh, styles)
    return model


def _parallelize(model: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    modules = dict(clean_named_modules(model))
    tied = ties(model)
    trained = {(o, leaf): p.requires_grad for o, leaf, p in owned_parameters(model)}
    # Inner modules first: Replicated takes what has no style of its own.
    for name in sorted(styles, key=lambda name: -len(name.split(".")) if name else 0):
        module, style = modules[name], styles[name]
        if isinstance(style, SequenceParallel):
            for parameter in module.parameters():
                _take_first_ranks_values(parameter, mesh)
        parallelize_module(module, mesh, style)
        if isinstance(module, nn.Embedding):
            _guard_embedding(module, style, mesh.size())
    for (owner, leaf), *others in tied:  # every owner has distributed a copy of its own
        for other, name in others:
            modules[other].register_parameter(name, modules[owner]._parameters[leaf])
    for owner, leaf, parameter in owned_parameters(model):
        parameter.requires_grad_(trained[owner, leaf])  # SequenceParallel unfreezes (torch 2.13)
    for buffer in model.buffers():
        if not isinstance(buffer, DTensor):
            _take_first_ranks_values(buffer, mesh)


def _take_first_ranks_values(tensor: Tensor, mesh: DeviceMesh) -> None:
    # Most styles distribute the first rank's values; SequenceParallel wraps what each rank has, and
    # no style looks at buffers.
    tensor.data = distribute_tensor(tensor.data, mesh, [Replicate()]).to_local()


def _guard_embedding(embedding: nn.Embedding, style: ParallelStyle, tp: int) -> None:
    splits_rows = isinstance(style, RowwiseParallel)
    splits_sequence = Shard(1) in getattr(style, "output_layouts", ())

    # The embedding is the first to communicate, and the last to see the sequence's full length.
    def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        tokens = inputs[0]
        if tokens.numel() == 0:  # gloo hangs in a reduce-scatter of nothing
            raise ValueError(
                f"apply_tp: tokens {list(tokens.shape)} are empty; give this rank a sample whose"
                " labels are all ignored"
            )
        if splits_sequence and tokens.ndim > 1:
            require_even_sequence("tokens", tokens, tp)
        if splits_rows:
            _require_rows(tokens, embedding.num_embeddings)

    embedding.register_forward_pre_hook(check, prepend=True)
    embedding.register_forward_hook(_settle)


def _require_rows(tokens: Tensor, rows: int) -> None:
    # On one process the look-up raises; a rank takes an id that isn't in its rows for another's,
    # and all ranks together give zeros.
    tokens = tokens.to_local() if isinstance(tokens, DTensor) else tokens
    refuse_where(
        (tokens < 0) | (tokens >= rows),
        tokens,
        f"apply_tp: tokens must be in [0, {rows}), the rows of the embedding"
        " (is the tokenizer larger than the vocabulary of the model?)",
    )


def _settle(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    # The output is still on its way (AsyncCollectiveTensor). As the input of a compiled block that
    # breaks the backward, or silently drops the embedding's gradient (pytorch#125677). Any op waits
    # for it and keeps the gradient; `.wait()` drops it.
    return output.clone()
