"""AdamW with weight decay where it belongs, steps that aren't finite skipped, and an end by tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def make_adamw(
    model: nn.Module,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_embeddings: bool = False,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW over the parameters of ``model`` that are trained; matrices decay, vectors don't.

    Two groups, "decay" and "no decay" (norms, biases, all that is 1-D), both on every mesh, so that
    a schedule's state fits any. Parameters of which some are DTensors and some aren't make four:
    torch's fused kernels take no mixture.

    Args:
        model: After the ``apply_*`` calls, which replace parameters.
        lr: Peak learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Of the "decay" group, times the learning rate.
        decay_embeddings: Whether the weights of `nn.Embedding` decay. A row is not touched by the
            loss in steps without its token, but decays in each; a head tied to it goes with it.
        fused: One kernel for all parameters; where there is none, foreach, and a line says so.

    Raises:
        ValueError: Nothing to train.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    names = ("decay", "no decay")
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"make_adamw: no parameter of {type(model).__name__} requires a gradient; build the"
            " optimizer after the model, and leave some of it unfrozen"
        )
    for kind in sorted({isinstance(parameter, DTensor) for parameter in trained}):
        for name in names:
            groups[kind, name] = []
    for parameter in trained:
        decays = parameter.ndim > 1 and (decay_embeddings or parameter not in tables)
        groups[isinstance(parameter, DTensor), names[not decays]].append(parameter)
    options = [
        {"params": some, "weight_decay": weight_decay if name == "decay" else 0.0, "name": name}
        for (_, name), some in groups.items()
    ]
    how = {"fused": True} if fused and _has_fused(trained) else {"foreach": True}
    return torch.optim.AdamW(options, lr, betas=betas, eps=eps, **how)


class SkipNonFinite:
    """Makes `optimizer.step` do nothing in a step whose gradients aren't all finite.

    The norm that ``ptx.clip_grad_norm_`` returns is equal on all ranks, so all skip together, and no
    further collective is needed. Reading it waits for the backward, once per step. The moments, their
    step counts and the weights stay as they are; schedule and data go on, as step numbers do.

    Args:
        patience: After so many skipped steps in a row the run ends; 0: never.

    Attributes:
        skipped: All steps skipped so far; in checkpoints, if this is in ``train_state``.
        in_a_row: Of these the last ones, if no other came after.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.skipped = self.in_a_row = 0

    def before_step(self, norm: Tensor, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Drops the gradients if ``norm`` isn't finite; returns whether it was.

        AdamW passes over parameters without a gradient, and a schedule sees its `step` called.

        Raises:
            FloatingPointError: ``patience`` steps in a row weren't finite, on every rank.
        """
        if bool(norm.isfinite()):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.patience and self.in_a_row >= self.patience:
            raise FloatingPointError(
                f"step {step}: the gradient norm is {norm.item()}, the {_ordinal(self.in_a_row)} step"
                " in a row that isn't finite; nothing was learned from them. Go on from the last"
                " checkpoint with a lower learning rate or fp32, or look for the layer in"
                " ptx.model_stats(model).flat(by_name=True)"
            )
        optimizer.zero_grad(set_to_none=True)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


def steps_of(steps: int, tokens: int, tokens_per_step: int) -> int:
    """The number of steps of a run that ends by steps, or (``tokens`` above 0) after that many tokens.

    The last step is whole: the run may see up to one step's tokens more.

    Raises:
        ValueError: A number is negative, or there are no tokens in a step.
    """
    if steps < 0 or tokens < 0 or tokens_per_step < 1:
        raise ValueError(
            f"steps_of: steps {steps} and tokens {tokens} must be from 0, tokens_per_step"
            f" {tokens_per_step} from 1"
        )
    return -(-tokens // tokens_per_step) if tokens else steps


def _has_fused(parameters: list[nn.Parameter]) -> bool:
    """Steps one entry of each kind of parameter, as nothing public tells; complains once if it can't."""
    for device, dtype in {(parameter.device.type, parameter.dtype) for parameter in parameters}:
        try:
            probe = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
            probe.grad = torch.zeros_like(probe)
            torch.optim.AdamW([probe], fused=True).step()
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            print(
                f"no fused AdamW for {dtype} on {device}, using foreach: {reason}", file=sys.stderr
            )
            return False
    return True


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
