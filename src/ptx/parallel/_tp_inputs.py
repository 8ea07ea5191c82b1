"""ParallelStyles for what enters a module: transformers' inputs, and arguments to refuse."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle

from ptx.parallel._tp_styles import replicated


class AttentionInput(PrepareModuleInput):
    """Gathers the ``hidden_states`` of a transformers attention once, for all of its projections.

    A hidden state longer than the ``position_embeddings`` is refused: a block was given the whole
    sequence, where under sequence parallelism it takes this rank's part.

    Also sets the module's ``num_key_value_groups`` to what it is on one rank. Transformers repeats
    keys and values that often, and where kv heads are replicated, fewer query heads share one.

    Args:
        layout: How the hidden state arrives: ``Shard(1)``, or ``Replicate()`` without sequence
            parallelism.
        heads: Query heads of the whole model.
        kv_heads: Key/value heads of the whole model.
        whole: Whether every rank computes all of them.
    """

    def __init__(
        self, layout: Placement, *, heads: int, kv_heads: int, whole: bool = False
    ) -> None:
        super().__init__(
            input_kwarg_layouts={"hidden_states": layout},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        self.layout = layout
        self.heads = heads
        self.kv_heads = kv_heads
        self.whole = whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = 1 if self.whole else device_mesh.size()
        groups = (self.heads // tp) // max(1, self.kv_heads // tp)
        module.num_key_value_groups = groups  # type: ignore[assignment]
        module.register_forward_pre_hook(_check_length, with_kwargs=True)
        return super()._apply(module, device_mesh)

    def __repr__(self) -> str:
        numbers = f"heads={self.heads}, kv_heads={self.kv_heads}, whole={self.whole}"
        return f"AttentionInput({self.layout!r}, {numbers})"


def _check_length(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, length = kwargs["hidden_states"], kwargs["position_embeddings"][0].shape[-2]
    if isinstance(hidden, DTensor) and hidden.shape[1] != length:
        raise ValueError(
            f"apply_tp: hidden states of {hidden.shape[1]} positions over all ranks, and position"
            f" embeddings for {length}; under sequence parallelism a block takes this rank's part of"
            " the hidden state (call the whole model, or split it first)"
        )


class RefuseArguments(ParallelStyle):
    """Raises when a module is called with arguments that would go wrong under tensor parallelism.

    Args:
        reasons: Argument -> what to do instead. None and False pass. A default in the
            module's ``config`` counts as passed.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        reasons, signature = self.reasons, inspect.signature(module.forward)
        module.register_forward_pre_hook(
            lambda module, args, kwargs: _refuse(
                reasons, module, signature.bind_partial(*args, **kwargs).arguments
            ),
            with_kwargs=True,
        )
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.reasons)})"


def _refuse(reasons: dict[str, str], module: nn.Module, arguments: Mapping[str, Any]) -> None:
    config = getattr(module, "config", None)
    # Those that the forward doesn't name are under its **kwargs.
    passed = {**arguments.get("kwargs", {}), **arguments}
    given = {name: passed.get(name, getattr(config, name, None)) for name in reasons}
    problems = [
        f"{name} was passed: {reasons[name]}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    if problems:
        raise ValueError("apply_tp: " + "; ".join(problems))


class ModelInput(RefuseArguments):
    """Splits ``inputs_embeds`` of a transformers model over the sequence, as its embedding is.

    Args:
        reasons: As for `RefuseArguments`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (args, _split_embeds(kwargs, device_mesh)), with_kwargs=True
        )
        return module


def _split_embeds(kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        return kwargs
    require_even_sequence("inputs_embeds", embeds, mesh.size())
    split = replicated(embeds, mesh).redistribute(placements=[Shard(1)])
    return {**kwargs, "inputs_embeds": split}


def require_even_sequence(what: str, tensor: Tensor, tp: int) -> None:
    """Refuse a [B, S, ...] tensor whose S doesn't split: torch assumes parts of one length."""
    length = tensor.shape[1]
    if length % tp:
        raise ValueError(
            f"apply_tp: {what} {list(tensor.shape)}: {length} positions don't split over tp={tp}"
            f" (sequence parallelism); pad to {length + tp - length % tp} with ignored labels, or"
            " plan with tp_plan(model, sequence_parallel=False)"
        )
