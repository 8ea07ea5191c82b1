"""Check a tensor-parallel plan against a model as a whole, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx._names import clean_named_modules, match_names
from ptx.parallel._tp_inputs import RefuseArguments
from ptx.parallel._tp_styles import HeadParallel, Replicated

# Styles that hook a module's call and leave its parameters alone.
_HOOKS_ONLY = (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RefuseArguments,
)


def check_plan(
    model: nn.Module, plan: Mapping[str, object], tp: int
) -> tuple[dict[str, ParallelStyle], list[str]]:
    """Module name -> its style, in the plan's order, and all that ``tp`` ranks can't do exactly."""
    modules = dict(clean_named_modules(model))
    styles, problems = _resolve(plan, _paths(model))
    problems += [
        f"{_as_glob(name)}: {problem}"
        for name, style in styles.items()
        if (problem := _misfit(style, modules[name], tp))
    ]
    problems += _uncovered(model, styles)
    problems += _torn_ties(model, styles, modules, tp)
    return styles, problems


def owned_parameters(model: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    """(module, name in it, parameter), each module once; a tied parameter has several owners."""
    return [
        (owner, leaf, parameter)
        for owner, module in clean_named_modules(model)
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    ]


def ties(model: nn.Module) -> list[list[tuple[str, str]]]:
    """The (module, name) slots of each parameter that has several."""
    slots: dict[int, list[tuple[str, str]]] = {}
    for owner, leaf, parameter in owned_parameters(model):
        slots.setdefault(id(parameter), []).append((owner, leaf))
    return [group for group in slots.values() if len(group) > 1]


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
    for owner, leaf, _ in owned_parameters(model):
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
    for slots in ties(model):
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


def _as_glob(name: str) -> str:
    parts = ("*" if part.isdigit() else part for part in name.split("."))
    return ".".join(parts) or "the model itself"
