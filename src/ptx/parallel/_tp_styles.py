"""ParallelStyles that torch lacks: whole heads, whole modules."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle


class HeadParallel(ParallelStyle):
    """Column-parallel nn.Linear whose output features are attention heads, cut between heads only.

    The output is this rank's heads, a plain tensor. With ``replicate`` (keys and values) there may
    be fewer heads than ranks: each rank then holds the whole weight and computes the one head that
    its query heads attend to. Gradients are exact: the parameters' are ``Partial`` DTensors,
    which ``full_tensor()``, FSDP2 and optimizers sum over tp.

    Args:
        heads: Heads of the whole model.
        replicate: Whether several ranks may compute the same head.

    Cost: with more ranks than heads, memory of the whole weight on each rank and compute of one
    head; no more collectives than ColwiseParallel.
    """

    def __init__(self, heads: int, *, replicate: bool = False) -> None:
        self.heads = heads
        self.replicate = replicate

    def is_split(self, tp: int) -> bool:
        """Whether each of ``tp`` ranks holds its own heads, rather than all of them."""
        return self.heads % tp == 0

    def misfit(self, tp: int) -> str | None:
        """Why ``tp`` ranks can't share these heads; None: they can."""
        if self.is_split(tp) or (self.replicate and tp % self.heads == 0):
            return None
        if self.replicate:
            return (
                f"{self.heads} kv heads and tp={tp}: neither divides the other; choose a tp that"
                f" divides {self.heads} (heads are split) or is a multiple (they are replicated), or"
                " keep attention whole"
            )
        return (
            f"{self.heads} heads don't split over tp={tp}; choose a tp that divides them, or keep"
            " attention whole (tp_plan(model, whole_attention=True))"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        tp = device_mesh.size()
        if self.is_split(tp):
            style = ColwiseParallel()
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        distribute_module(module, device_mesh)
        # A hook could only cut the output, after every rank had computed every head. A forward in the
        # instance's dict would be compiled anew for every block.
        module.__class__ = _OneHead
        assert isinstance(module, _OneHead)
        module.head = device_mesh.get_local_rank() // (tp // self.heads)
        module.head_width = module.out_features // self.heads
        return module

    def __repr__(self) -> str:
        return f"HeadParallel(heads={self.heads}, replicate={self.replicate})"


class _OneHead(nn.Linear):
    """Computes one head's features; each gradient is this rank's share of a sum over the ranks."""

    head: int
    head_width: int

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        rows = slice(self.head * self.head_width, (self.head + 1) * self.head_width)
        assert isinstance(weight, DTensor)
        x = replicated(x, weight.device_mesh).to_local(grad_placements=[Partial()])
        local_weight = weight.to_local(grad_placements=[Partial()])[rows]
        if bias is None:
            return F.linear(x, local_weight)
        assert isinstance(bias, DTensor)
        return F.linear(x, local_weight, bias.to_local(grad_placements=[Partial()])[rows])


class Replicated(ParallelStyle):
    """A module that every rank computes in full from equal inputs: norms, routers, a whole model.

    It takes all parameters in the module that have no style of their own, so on ``""``, the model
    itself, it takes what is left. They become DTensors (``Replicate``), since optimizers and
    gradient clipping take no mixture of those and plain tensors; but in the module's code
    ``self.weight`` is the plain tensor, for layers that DTensors don't know. Positional inputs that
    are DTensors are gathered. Gradients need no collective, as they are equal on every rank.

    Args:
        output: What the output becomes, e.g. ``Shard(1)``: this rank's part of the sequence, a plain
            tensor. None: it stays as it is.
    """

    def __init__(self, *, output: Placement | None = None) -> None:
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            if _hold_whole(part, device_mesh):
                part.__class__ = _plain_inside(type(part))  # type: ignore[arg-type]  # a class is hashable
        module.register_forward_pre_hook(_gather_inputs)
        if self.output is not None:
            split = [self.output]
            module.register_forward_hook(
                lambda _, inputs, output: (
                    replicated(output, device_mesh).redistribute(placements=split).to_local()
                )
            )
        return module

    def __repr__(self) -> str:
        return "Replicated()" if self.output is None else f"Replicated(output={self.output!r})"


def _hold_whole(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Make the module's own plain parameters replicated DTensors; whether there were any."""
    plain = {n: p for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
    for name, parameter in plain.items():
        whole = distribute_tensor(parameter.data, mesh, [Replicate()])
        module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
    return bool(plain)


@functools.cache  # one class for all blocks: compile and find_blocks know them by it
def _plain_inside(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass in which ``self.weight`` is a plain tensor, while FSDP has it gathered."""

    def get(self: nn.Module, name: str) -> Any:
        value: Any = kind.__getattr__(self, name)
        gathered = isinstance(value, DTensor) and value.placements == (Replicate(),)
        return value.to_local() if gathered else value

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__getattr__": get, **names})


def _gather_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x
        for x in inputs
    )


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor that every rank holds in full; a plain tensor must be equal on every rank."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    assert isinstance(x, DTensor)
    if x.placements == (Replicate(),):
        # Even then redistribute has a backward: it would all-reduce a gradient that is Partial.
        return x
    return x.redistribute(placements=[Replicate()])
