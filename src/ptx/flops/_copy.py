"""A copy of a model without its storage: plain, whole, fake parameters in the same Python objects."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ptx._names import clean_name
from ptx.flops._sharded import (
    WHERE,
    inner_module,
    is_dtensor,
    is_parallel,
    overrides_method,
    plain_class,
    refuse_unseen,
    restored,
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ATOMS = str | int | float | complex | bytes | type | torch.dtype | torch.device | torch.Generator
# Objects of these hold the process's state; a model that refers to them shares it.
_SHARED = ("torch.distributed.", "torch._dynamo.", "torch.optim.", "torch.utils.data.")


class PlainCopy:
    """Copies modules, functions and containers; each tensor becomes a fake one in its global shape.

    Nothing of the original is written to, no storage is read but that of tensors of one element,
    and none is made. What a forward changes in modules, lists and dicts it changes in the copy.
    Wrappers, hooks and classes of parallelism are left out, recomputation is kept.

    Args:
        mode: The mode that the tensors will live in.
        device: Where all of them are said to be.

    Attributes:
        names: Of the modules made, by id.
        originals: Ids of the modules they are copies of.
        cast: Two dtypes: tensors of the first, other than parameters, become ones of the second.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self.names: dict[int, str] = {}
        self.originals: set[int] = set()
        self.cast: tuple[torch.dtype, torch.dtype] | None = None
        self.memo: dict[int, Any] = {}
        self.alive: list[Any] = []  # ids are of living objects only

    def __call__(self, value: Any, name: str = "") -> Any:
        """The copy of ``value``, which may be anything; ``name`` is for the modules in it."""
        if value is None or isinstance(value, _ATOMS):
            return value
        if id(value) not in self.memo:
            self.alive.append(value)
            self.memo[id(value)] = value  # while it is being copied, and if there is nothing to
            self.memo[id(value)] = self._new(value, name)
        return self.memo[id(value)]

    def tensor(self, tensor: Tensor) -> Tensor:
        """The fake tensor for one that a function brings along, not as a parameter."""
        if tensor.requires_grad:
            raise ValueError(
                f"{WHERE}: a tensor {list(tensor.shape)} that requires grad is in no module and no"
                " argument; register it as a parameter, or pass it"
            )
        fake: Tensor = self(tensor)
        return fake

    def _new(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value, name)
        if isinstance(value, types.FunctionType):
            return self._function(value, name)
        if isinstance(value, types.MethodType):
            function, owner = self(value.__func__, name), self(value.__self__, name)
            same = function is value.__func__ and owner is value.__self__
            return value if same else types.MethodType(function, owner)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            func, args, keywords = (self(part, name) for part in parts)
            return functools.partial(func, *args, **keywords)
        if isinstance(value, weakref.ref):
            target = value()
            found = self(target, name)
            return value if found is target else weakref.ref(found)
        return self._container(value, name)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):
            raise ValueError(f"{WHERE}: a lazy parameter has no shape yet; call the model once")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(
                f"{WHERE}: a tensor of layout {tensor.layout} can't be counted; make it dense"
            )
        # A constant, so that code can branch on a flag.
        with unset_fake_temporarily():
            constant = tensor.item() if _can_be_read(tensor) else None
        has_parts: bool = is_traceable_wrapper_subclass(tensor)
        with self.mode, torch.no_grad():
            if constant is not None:
                fake = torch.tensor(constant, dtype=tensor.dtype, device=self.device)
                fake = fake.reshape(tensor.shape)
            elif has_parts and not is_dtensor(tensor):
                fake = self.mode.from_tensor(tensor)
            else:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            if self.cast is not None and fake.dtype == self.cast[0]:
                fake = fake.to(self.cast[1])
            return fake.requires_grad_(tensor.requires_grad)

    def _module(self, module: nn.Module, name: str) -> nn.Module:
        refuse_unseen(module)
        self.originals.add(id(module))
        inner = inner_module(module)
        if inner is not None:
            new: nn.Module = self(inner, name)
            return new
        kind = plain_class(module)
        new = object.__new__(kind)  # past a __new__ of the class, which may take arguments
        self.memo[id(module)] = new
        self.names[id(new)] = clean_name(name)
        for key, value in vars(module).items():
            if not overrides_method(key, value):
                new.__dict__[key] = self._attribute(module, key, value, name)
        return new

    def _attribute(self, module: nn.Module, key: str, value: Any, name: str) -> Any:
        if key in _HOOKS:
            kept = ((i, hook) for i, hook in value.items() if not is_parallel(hook))
            return OrderedDict((i, self(hook, name)) for i, hook in kept)
        if key == "_modules":
            return {child: self(m, _join(name, child)) for child, m in value.items()}
        if key == "_compiled_call_impl":
            return None
        return self(restored(module, key, value), _join(name, key))

    def _function(self, function: types.FunctionType, name: str) -> types.FunctionType:
        """The same code over copies of what it closes over, of its defaults and global modules."""
        code, scope = function.__code__, function.__globals__
        values = [_content(cell) for cell in function.__closure__ or ()]
        closure = [self(value, _join(name, key)) for key, value in zip(code.co_freevars, values)]
        defaults, by_keyword = self(function.__defaults__), self(function.__kwdefaults__)
        modules = {key: self(scope[key], key) for key in _global_modules(code, scope)}
        same = all(new is old for new, old in zip(closure, values))
        if same and not modules and not by_keyword and defaults is function.__defaults__:
            return function
        cells = (types.CellType(*([] if value is _EMPTY else [value])) for value in closure)
        new = types.FunctionType(
            code,
            {**scope, **modules} if modules else scope,
            function.__name__,
            defaults,
            tuple(cells),
        )
        new.__dict__.update(function.__dict__)
        new.__kwdefaults__, new.__qualname__ = by_keyword, function.__qualname__
        return new

    def _container(self, value: Any, name: str) -> Any:
        if isinstance(value, tuple | frozenset):
            parts = [self(part, _join(name, i)) for i, part in enumerate(value)]
            if all(new is old for new, old in zip(parts, value)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, list | dict | set | deque):
            new = self._shallow(value)
            if isinstance(new, dict):
                for key, part in list(new.items()):
                    # Not by the class's own rules, if it has some.
                    dict.__setitem__(new, key, self(part, _join(name, key)))
            elif isinstance(new, set):
                parts = [self(part, name) for part in value]
                new.clear()
                new.update(parts)
            else:
                for i, part in enumerate(value):
                    new[i] = self(part, _join(name, i))
            if hasattr(new, "__dict__"):
                self._refill(new, name)
            return new
        if _holds_tensors(value):
            new = self._shallow(value)
            if new is not value:
                self._refill(new, name)
            return new
        return value

    def _shallow(self, value: Any) -> Any:
        try:
            new = copy.copy(value)
        except Exception:  # an object with rules of its own is shared
            return value
        self.memo[id(value)] = new
        return new

    def _refill(self, new: Any, name: str) -> None:
        for key, part in list(vars(new).items()):
            vars(new)[key] = self(part, _join(name, key))


_EMPTY = object()  # a cell that nothing was assigned to yet


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _global_modules(code: types.CodeType, scope: dict[str, Any]) -> list[str]:
    """Names of global modules that a function uses, or a function in it."""
    names = [name for name in code.co_names if isinstance(scope.get(name), nn.Module)]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _global_modules(inner, scope)
    return names


def _holds_tensors(value: Any) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, types.ModuleType):
        return False
    if type(value).__module__.startswith(_SHARED):
        return False
    held: list[Any] = []
    for part in vars(value).values():
        held += part.values() if isinstance(part, dict) else [part]
        held += part if isinstance(part, list | tuple) else []
    return any(isinstance(part, Tensor | nn.Module) for part in held)


def _can_be_read(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.numel() == 1
        and not tensor.is_meta
        and not tensor.requires_grad
    )


def _join(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)
