"""Which dtypes a run really uses: read off the model and the optimizer, nothing repeated from flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class PrecisionProbe:
    """Sees what the model returns, and sums up after the first step.

    Args:
        model: After all ``apply_*`` calls, before the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.output: torch.dtype | None = None
        self._hook = model.register_forward_hook(self._look)

    def summary(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, str]:
        """For a log and a report, "precision/..." to dtypes; several with their share of parameters.

        Call it after ``optimizer.step()`` and before ``zero_grad()``: earlier there is no state,
        later there are no gradients to look at.

        Args:
            optimizer: Its state, one entry per kind ("exp_avg"), without step counts.
            loss: As ``backward`` was called on.

        Returns:
            "master": parameters between steps; "compute": what FSDP gathers them as, and matmuls
            run in; "matmul": what torch makes of float32 ones; "output": what the model returned;
            "loss"; "gradient"; "reduce": what FSDP sums them in; "optimizer/...".
        """
        self._hook.remove()  # here, not after one forward: a copy of the model may have had that
        parameters = list(self.model.parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        compute, reduce = _by_fsdp(self.model)
        seen = {
            "master": _share((p.dtype, p.numel()) for p in parameters),
            "compute": _share(compute),
            "matmul": f"float32 at {torch.get_float32_matmul_precision()!r} precision",
            "output": _name(self.output) if self.output else "",
            "loss": _name(loss.dtype),
            "gradient": _share((grad.dtype, grad.numel()) for grad in grads),
            "reduce": _share(reduce),
        }
        kinds: dict[str, list[tuple[torch.dtype, int]]] = {}
        for state in optimizer.state.values():
            for kind, value in state.items():
                if isinstance(value, Tensor) and kind != "step":
                    kinds.setdefault(f"optimizer/{kind}", []).append((value.dtype, value.numel()))
        seen |= {kind: _share(values) for kind, values in kinds.items()}
        return {f"precision/{what}": dtypes for what, dtypes in seen.items() if dtypes}

    def _look(self, _: nn.Module, __: Any, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            self.output = first.dtype


def _by_fsdp(
    model: nn.Module,
) -> tuple[list[tuple[torch.dtype, int]], list[tuple[torch.dtype, int]]]:
    """(dtype, entries) that FSDP computes and reduces in; parameters it doesn't manage keep theirs."""
    compute: list[tuple[torch.dtype, int]] = []
    reduce: list[tuple[torch.dtype, int]] = []
    managed: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Private: FSDP2 shows its policy nowhere. A later torch may have several groups per module.
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in [group for group in groups if group]:
            for parameter in [fsdp.sharded_param for fsdp in group.fsdp_params]:
                policy, size = group.mp_policy, parameter.numel()
                used = policy.param_dtype or parameter.dtype
                managed.add(parameter)
                compute.append((used, size))
                reduce.append((policy.reduce_dtype or used, size))
    for parameter in model.parameters():
        if parameter not in managed:
            compute.append((parameter.dtype, parameter.numel()))
            if isinstance(parameter, DTensor):
                reduce.append((parameter.dtype, parameter.numel()))
    return compute, reduce


def _share(counts: Iterable[tuple[torch.dtype, int]]) -> str:
    """One dtype, or several: "bfloat16 (97 %), float32 (3 %)"."""
    total: Counter[str] = Counter()
    for dtype, size in counts:
        total[_name(dtype)] += size
    if len(total) < 2:
        return "".join(total)
    return ", ".join(
        f"{name} ({100 * size / total.total():.3g} %)" for name, size in total.most_common()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
