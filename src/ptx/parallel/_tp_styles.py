"""The ParallelStyles that torch lacks: whole heads, kept whole, transformers' attention and block inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle


class HeadParallel(ParallelStyle):
    """Column-parallel nn.Linear whose output is attention heads, split between heads only.

    The output is this rank's heads, a plain tensor. With ``replicate`` (keys and values) there may be fewer heads than
    ranks: each rank then holds the whole weight and computes the one head that its query heads attend to. Every
    gradient is exact: the weight's is a DTensor ``Partial``, summed over tp by ``full_tensor()``, FSDP2 and optimizers.

    Args:
        heads: Heads of the whole model.
        replicate: Whether a head may be computed by several ranks.

    Cost: with more ranks than heads, memory of the whole weight on each rank, compute of one head; no collective more.
    """

    def __init__(self, heads: int, *, replicate: bool = False) -> None:
        self.heads = heads
        self.replicate = replicate

    def split_problem(self, tp: int) -> str | None:
        """Why ``tp`` ranks can't share these heads; None: they can."""
        if self.heads % tp == 0 or (self.replicate and tp % self.heads == 0):
            return None
        if self.replicate:
            return (
                f"{self.heads} kv heads and tp={tp}: one must divide the other (kv heads are split, or replicated);"
                f" choose another tp"
            )
        return f"{self.heads} heads don't split over tp={tp}; choose a tp that divides them"

    def is_split(self, tp: int) -> bool:
        """Whether each rank holds some of the heads, rather than all of them."""
        return self.heads % tp == 0

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        tp = device_mesh.size()
        if self.is_split(tp):
            style = ColwiseParallel()
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        distribute_module(module, device_mesh)
        head = device_mesh.get_local_rank() // (tp // self.heads)
        width = module.out_features // self.heads
        rows = slice(head * width, (head + 1) * width)
        # A hook could only cut the output, after every rank had computed every head.
        module.forward = partial(_linear_rows, module, rows, device_mesh)  # type: ignore[method-assign]
        return module

    def __repr__(self) -> str:
        return f"HeadParallel(heads={self.heads}, replicate={self.replicate})"


def _linear_rows(module: nn.Linear, rows: slice, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """These output features only; gradients of x and of the parameters are this rank's share of a sum."""
    x = _replicated(x, mesh).to_local(grad_placements=[Partial()])
    weight, bias = (
        None if p is None else p.to_local(grad_placements=[Partial()])[rows]  # type: ignore[attr-defined]
        for p in (module.weight, module.bias)
    )
    assert weight is not None
    return F.linear(x, weight, bias)


class Replicated(ParallelStyle):
    """A module every rank computes in full, on equal inputs: norms without sequence parallelism, a router, a small head.

    Its parameters become DTensors (``Replicate``) all the same: beside the sharded ones, plain tensors would break
    optimizers and gradient clipping, which take no mixture. Inputs are plain and equal on every rank, or
    DTensors; outputs are plain. Gradients need no collective.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _replicate_inputs, _localise_output)

    def __repr__(self) -> str:
        return "Replicated()"


def _replicate_inputs(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(_replicated(x, mesh) if isinstance(x, Tensor) else x for x in inputs)


def _localise_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    if isinstance(output, tuple):
        return tuple(_localise_output(_, x, mesh) for x in output)
    if not isinstance(output, DTensor):
        return output
    return output.redistribute(placements=[Replicate()]).to_local()


class AttentionInput(PrepareModuleInput):
    """Gathers ``hidden_states`` of a transformers attention module once, for all of its projections.

    Also sets the module's ``num_key_value_groups``, the query heads that share a key/value head, to what it is on one
    rank: transformers repeats keys and values by it, and with replicated kv heads a rank has fewer query heads to each.

    Args:
        layout: How the hidden state arrives: ``Shard(1)``, or ``Replicate()`` without sequence parallelism.
        heads: Query heads of the whole model.
        kv_heads: Key/value heads of the whole model.
    """

    def __init__(self, layout: Placement, *, heads: int, kv_heads: int) -> None:
        super().__init__(
            input_kwarg_layouts={"hidden_states": layout},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        self.layout = layout
        self.heads = heads
        self.kv_heads = kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        module.num_key_value_groups = (self.heads // tp) // max(1, self.kv_heads // tp)  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"AttentionInput({self.layout!r}, heads={self.heads}, kv_heads={self.kv_heads})"


class BlockInput(ParallelStyle):
    """Makes the hidden state of a transformers block this rank's part of the sequence, a plain tensor.

    A plain tensor may be that part already (the block before made it) or the whole sequence (``inputs_embeds``). The
    block's ``position_embeddings`` are always for the whole sequence, so their length tells which; any other
    length is refused instead of being gathered into something longer.

    Cost: none, except in front of the first block if the whole sequence was given (all-gather of its gradient).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook = partial(_split_hidden, device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return "BlockInput()"


def _split_hidden(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = args[0] if args else kwargs["hidden_states"]
    tp, length = mesh.size(), kwargs["position_embeddings"][0].shape[-2]
    if not isinstance(hidden, DTensor) and hidden.shape[1] == length:
        require_even_sequence("inputs_embeds", length, tp)
        hidden = _replicated(hidden, mesh)
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[Shard(1)]).to_local()
    if hidden.shape[1] * tp != length:
        raise ValueError(
            f"apply_tp: a block got hidden states of {hidden.shape[1]} positions, with position embeddings for {length};"
            f" over tp={tp} pass this rank's {length / tp:g} positions, or all {length}"
        )
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


class RefuseArguments(ParallelStyle):
    """Raises when a module is called with arguments that would be wrong under tensor parallelism.

    Args:
        reasons: Keyword argument -> what to do instead. Arguments that are None or False pass.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_refuse, self.reasons), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"RefuseArguments({list(self.reasons)})"


def _refuse(
    reasons: dict[str, str], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = [name for name in reasons if kwargs.get(name) is not None and kwargs[name] is not False]
    if given:
        raise ValueError("apply_tp: " + "; ".join(f"{name}= was passed: {reasons[name]}" for name in given))


def require_even_sequence(what: str, length: int, tp: int) -> None:
    """Under sequence parallelism local parts are all as long as the first: torch would guess a longer whole."""
    if length % tp:
        raise ValueError(
            f"apply_tp: {what}: a sequence of {length} positions doesn't split over tp={tp} (sequence parallel); pad it"
            f" to {length + tp - length % tp} with ignored labels, or plan with tp_plan(model, sequence_parallel=False)"
        )


def _replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """As a DTensor that every rank holds in full; a plain tensor is taken to be equal on every rank already."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[Replicate()])
