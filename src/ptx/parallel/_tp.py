"""Tensor parallelism: check a plan against a model and a mesh as a whole, then apply it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx._checks import refuse_where
from ptx._names import clean_named_modules, match_names
from ptx.parallel._order import require_before
from ptx.parallel._tp_plan import tp_plan
from ptx.parallel._tp_styles import (
    HeadParallel,
    RefuseArguments,
    Replicated,
    require_even_sequence,
)

# Styles that hook a module's call and leave its parameters alone.
_HOOKS_ONLY = (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RefuseArguments,
)


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
    modules = dict(clean_named_modules(model))
    styles, problems = _resolve(plan, _paths(model))
    problems += [
        f"{_as_glob(name)}: {problem}"
        for name, style in styles.items()
        if (problem := _misfit(style, modules[name], tp))
    ]
    problems += _uncovered(model, styles)
    problems += _torn_ties(model, styles, modules, tp)
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise ValueError(f"apply_tp: the plan doesn't fit {type(model).__name__}:{lines}")
    if tp > 1:
        _parallelize(model, mesh, styles, modules)
    return model


def _paths(model: nn.Module) -> dict[str, str]:
    """Every path to a module -> the first path to it, its name."""
    first: dict[nn.Module, str] = {}
    return {
        path: first.setdefault(module, path)
        for path, module in model.named_modules(remove_duplicate=False)
    }


def _resolve(
    plan: Mapping[str, object], paths: dict[str, str]
) -> tuple[dict[str, ParallelStyle], list[str]]:
    """Module name -> its style, in the plan's order, and what is wrong with the keys."""
    styles: dict[str, ParallelStyle] = {}
    chosen_by: dict[str, str] = {}
    problems = []
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            problems.append(f"{key!r}: {style!r} is no ParallelStyle")
            continue
        try:
            names = {paths[path]: None for path in match_names(key, paths, where="")}
        except ValueError as error:
            problems.append(str(error).removeprefix(": "))
            continue
        for name in names:
            if name in styles:
                problems.append(
                    f"{chosen_by[name]!r} and {key!r} both match {name!r}; a module has one style:"
                    " drop a key, or narrow it"
                )
            styles[name], chosen_by[name] = style, key
    return styles, problems


def _misfit(style: ParallelStyle, module: nn.Module, tp: int) -> str | None:
    """Why ``tp`` ranks can't apply this style to this module, exactly; None: they can."""
    kind = type(module).__name__
    if isinstance(style, Replicated):
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            return f"{kind} holds its parameters in a list of its own too; tp can't replace them"
        return None
    splits = isinstance(style, HeadParallel | ColwiseParallel | RowwiseParallel)
    splits = splits and isinstance(module, nn.Linear | nn.Embedding)
    if splits and any("." in name for name, _ in module.named_parameters()):
        return f"{kind} has parameters in submodules (a parametrization?); use Replicated()"
    if isinstance(style, HeadParallel):
        if not isinstance(module, nn.Linear):
            return f"HeadParallel takes an nn.Linear, not {kind}"
        if module.out_features % style.heads:
            return f"{module.out_features} features aren't {style.heads} heads of one width"
        if type(module).forward is not nn.Linear.forward and not style.is_split(tp):
            return f"{kind} has a forward of its own, which replicating heads would replace"
        return style.misfit(tp)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    columns = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Linear):
        size = module.out_features if columns else module.in_features
    elif isinstance(module, nn.Embedding):
        size = module.embedding_dim if columns else 0  # rows: unequal parts are fine
    else:
        return f"{type(style).__name__} takes an nn.Linear or an nn.Embedding, not {kind}"
    # Plain parts of unequal size are put together again by guessing; a DTensor knows its sizes.
    guessed = not columns or (
        style.use_local_output and any(p.is_shard() for p in style.output_layouts)
    )
    if size % tp and guessed:
        return (
            f"{size} features don't split over tp={tp}; choose a tp that divides them, widen the"
            " layer, or keep it whole with Replicated()"
        )
    return None


def _uncovered(model: nn.Module, styles: dict[str, ParallelStyle]) -> list[str]:
    # Such a parameter would stay a plain tensor: under sequence parallelism its gradient is one
    # rank's share, unsummed, and optimizers refuse plain tensors beside DTensors.
    sharding = {name for name, style in styles.items() if not isinstance(style, _HOOKS_ONLY)}
    left = []
    for owner, leaf, _ in _owned_parameters(model):
        parts = owner.split(".")
        outer = (".".join(parts[:depth]) for depth in range(len(parts) + 1))
        if not any(name in sharding for name in outer):
            left.append(_as_glob(f"{owner}.{leaf}" if owner else leaf))
    if not left:
        return []
    names = ", ".join(dict.fromkeys(left))
    return [
        f"no key covers {names}; add keys for their modules (Replicated() keeps one whole;"
        ' the key of the model itself is "")'
    ]


def _torn_ties(
    model: nn.Module, styles: dict[str, ParallelStyle], modules: dict[str, nn.Module], tp: int
) -> list[str]:
    problems = []
    for slots in _ties(model):
        placed = {}
        for owner, leaf in slots:
            placement = _placement(styles.get(owner), modules[owner], leaf, tp)
            if placement is not None:
                placed[f"{owner}.{leaf}"] = placement
        if len(set(placed.values())) > 1:
            found = ", ".join(f"{name} {placement!r}" for name, placement in placed.items())
            problems.append(
                f"one tied parameter would be sharded in several ways, {found}; an embedding's"
                " RowwiseParallel and a head's ColwiseParallel agree, Shard(dim=0)"
            )
    return problems


def _owned_parameters(model: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    """(module, name in it, parameter), each module once; a tied parameter has several owners."""
    return [
        (owner, leaf, parameter)
        for owner, module in clean_named_modules(model)
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    ]


def _ties(model: nn.Module) -> list[list[tuple[str, str]]]:
    """The (module, name) slots of each parameter that has several."""
    slots: dict[int, list[tuple[str, str]]] = {}
    for owner, leaf, parameter in _owned_parameters(model):
        slots.setdefault(id(parameter), []).append((owner, leaf))
    return [group for group in slots.values() if len(group) > 1]


def _placement(
    style: ParallelStyle | None, module: nn.Module, leaf: str, tp: int
) -> Placement | None:
    """How a style will place a module's parameter; None: not known beforehand."""
    if isinstance(style, HeadParallel):
        return Shard(0) if style.is_split(tp) else Replicate()
    if isinstance(style, SequenceParallel | Replicated):
        return Replicate()
    if isinstance(style, ColwiseParallel):
        return Shard(1) if isinstance(module, nn.Embedding) else Shard(0)
    if isinstance(style, RowwiseParallel):
        if isinstance(module, nn.Embedding):
            return Shard(0)
        return Replicate() if leaf == "bias" else Shard(1)
    return None


def _parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: dict[str, ParallelStyle],
    modules: dict[str, nn.Module],
) -> None:
    ties = _ties(model)
    trained = {(o, leaf): p.requires_grad for o, leaf, p in _owned_parameters(model)}
    # Inner modules first: Replicated takes what has no style of its own.
    for name in sorted(styles, key=lambda name: -len(name.split(".")) if name else 0):
        module, style = modules[name], styles[name]
        if isinstance(style, SequenceParallel):
            for parameter in module.parameters():
                _take_first_ranks_values(parameter, mesh)
        parallelize_module(module, mesh, style)
        if isinstance(module, nn.Embedding):
            _guard_embedding(module, style, mesh.size())
    for (owner, leaf), *others in ties:  # every owner has distributed a copy of its own
        for other, name in others:
            modules[other].register_parameter(name, modules[owner]._parameters[leaf])
    for owner, leaf, parameter in _owned_parameters(model):
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


def _as_glob(name: str) -> str:
    parts = ("*" if part.isdigit() else part for part in name.split("."))
    return ".".join(parts) or "the model itself"
