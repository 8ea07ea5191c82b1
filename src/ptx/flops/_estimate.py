"""Count the FLOPs of a model's own forward and backward, without running them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ptx.flops._attention import FusedAttention, flex_on_any_device
from ptx.flops._copy import PlainCopy
from ptx.flops._counter import OpCounter
from ptx.flops._flop_count import Causal, FlopCount
from ptx.flops._modules import ModuleStack
from ptx.flops._sharded import WHERE, compute_dtype

_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def estimate_flops_fake(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    backward: bool = True,
    causal: Causal = "full",
    **kwargs: Any,
) -> FlopCount:
    """FLOPs of ``model(*args, **kwargs)`` and its backward, counted op by op on fake tensors.

    Always of the whole model, for the batch given: what was made of the model by `apply_tp`,
    `apply_fsdp2`, `apply_compile` and their torch counterparts is looked through, and a DTensor is
    taken in its global shape. Give the batch whose FLOPs you want to know, the global one say, on
    any device: shapes and dtypes are all that is read.

    What counts: products of matrices and vectors, convolutions and attention, a multiply-add as 2.
    Element-wise ops, reductions, norms, softmax, look-ups and the optimizer count nothing. Padding
    counts as what it pads. Attention (``F.scaled_dot_product_attention`` on any device, the fused ops
    behind it, flex_attention) is 2 products forward and 4 backward; what flash attention repeats
    inside is counted nowhere. Masks, windows and documents leave the square of queries and keys as
    it is; ``causal="half"`` counts the pairs that a call with ``is_causal=True`` keeps,
    S (S + 1) / 2. Attention written out as products counts as these. Gradients count where autograd
    computes them: not for frozen weights, nor for the input of a first layer.

    Recomputation (`apply_ac`, ``torch.utils.checkpoint``, chunked losses) is ``recompute``, in no
    other number; torch leaves a block's last products out where nothing needs their results.

    Args:
        model: A module on any device, meta too; or a function that calls modules, which are found
            among its arguments, in its closure and among its globals::

                estimate_flops_fake(lambda x, y: loss_fn(model(x), y), tokens, labels)

        args: The model's arguments: tensors, containers and objects with tensors, anything else.
        backward: Count the gradients too, of the sum of all floating outputs that require grad. An
            output may be a tensor, a loss among others, or a container or object with tensors.
        causal: "full" or "half".
        kwargs: The model's keyword arguments.

    Returns:
        A `FlopCount`.

    Raises:
        ValueError: An op without a formula (the message says how to register one), one whose result
            depends on values, a collective in the model's own code, or any other that doesn't run on
            fake tensors: it names the op and its module. A part of a pipeline; nothing to count;
            nothing that requires grad. Errors of the model's own code come as they are, with a
            note.

    Cost: no storage, no communication; on a CPU some 0.2 ms for each op of forward and backward.
    Model, gradients, random states, autocast and hooks stay as they are: what runs is a copy of the
    Python objects. Compiled code runs uncompiled.
    """
    if causal not in ("full", "half"):
        raise ValueError(f'{WHERE}: causal must be "full" or "half", got {causal!r}')
    if not callable(model):
        raise ValueError(f"{WHERE}: the model must be a module or a function, got {model!r}")
    mode = FakeTensorMode()
    device = _device(model, args, kwargs)
    plain = PlainCopy(mode, device)
    counter = OpCounter(ModuleStack(plain.names, plain.originals), plain.tensor, causal)
    try:
        with ExitStack() as stack:
            stack.enter_context(_undisturbed(device, backward))
            run = plain(model)
            plain.cast = _input_cast(model)
            args, kwargs = plain(args, "args"), plain(kwargs)
            for context in (mode, counter.modules.watched(), counter, FusedAttention()):
                stack.enter_context(context)
            outputs = run(*args, **kwargs)
            if backward:
                _backward(outputs, counter)
    except Exception as error:
        _explain(error, counter)
    count = counter.result()
    if not count.forward:
        raise ValueError(f"{WHERE}: nothing to count: no product, convolution or attention ran")
    return count


def _backward(outputs: Any, counter: OpCounter) -> None:
    wanted = list({id(t): t for t in _tensors(outputs, set()) if t.requires_grad}.values())
    if not wanted and any(phase == "backward" for _, _, phase in counter.pieces):
        return  # the function was a whole step
    if not wanted:
        raise ValueError(
            f"{WHERE}: no output requires grad; pass backward=False, or unfreeze a parameter"
        )
    counter.modules.stack.clear()
    counter.in_backward = True
    # Edges, because with tensors torch hands the call to the TorchFunctionMode, inside of which that
    # mode is off: recomputation wouldn't be what the forward was.
    edges = [torch.autograd.graph.get_gradient_edge(output) for output in wanted]
    torch.autograd.backward(edges, [torch.ones_like(output) for output in wanted])


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The floating tensors in an output, whatever holds them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
        return
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        parts += vars(value).values()
    for part in parts:
        yield from _tensors(part, seen)


def _device(*values: Any) -> torch.device:
    """The accelerator that something lives on, else the CPU: a fake tensor is as fast on either."""
    for value in values:
        for tensor in _all_tensors(value, set()):
            if tensor.device.type not in {"cpu", "meta"}:
                return torch.device(tensor.device.type, tensor.device.index)
    return torch.device("cpu")


def _all_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    else:
        yield from _tensors(value, seen)


def _input_cast(model: Any) -> tuple[torch.dtype, torch.dtype] | None:
    # FSDP's mixed precision casts parameters, which here stay as they were built; inputs that were
    # prepared for it must fit them.
    if not isinstance(model, nn.Module) or (computed := compute_dtype(model)) is None:
        return None
    built = next((p.dtype for p in model.parameters() if p.is_floating_point()), computed)
    return None if built == computed else (computed, built)


@contextmanager
def _undisturbed(device: torch.device, backward: bool) -> Iterator[None]:
    """Where a count runs: as in training, and so that nothing of the process changes."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        # No fake tensor is drawn, but code may seed.
        seeded = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=seeded))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(backward))
        # On one thread the functions that are running can be read in the backward, on any device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Ops that are a whole RNN come as their parts.
        backends: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
        for backend in backends:
            stack.callback(setattr, backend, "enabled", backend.enabled)
            backend.enabled = False
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(flex_on_any_device())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device(device))
        yield


def _explain(error: Exception, counter: OpCounter) -> None:
    """Raise ``error`` again, saying where."""
    if counter.failure is not None and counter.failure[0] is error:
        _, op, module = counter.failure
        what = str(error).removeprefix(f"{WHERE}: ")
        if isinstance(error, _VALUE_ERRORS):
            what = (
                "its result depends on values, and fake tensors have none; leave out the argument"
                " that is read (a mask, say), or pass a Python number"
            )
        raise ValueError(f"{WHERE}: {op} in module {module!r} stopped the count: {what}") from error
    failure = counter.modules.failure
    if failure is not None and failure[0] is error and not str(error).startswith(WHERE):
        error.add_note(f"{WHERE}: in module {failure[1]!r}, run on fake tensors")
    raise error
