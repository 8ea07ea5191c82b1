"""Names of modules and parameters as the model's author wrote them, and globs over such names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

# What activation checkpointing, torch.compile and FSDP1 insert between a module and its child.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def clean_name(name: str) -> str:
    """``"layers.0._orig_mod.wq"`` -> ``"layers.0.wq"``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def clean_named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like ``model.named_modules()``, without wrapper prefixes; a wrapped module appears once, as its wrapper."""
    seen = set()
    for name, module in model.named_modules():
        name = clean_name(name)
        if name not in seen:
            seen.add(name)
            yield name, module


def clean_named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Like ``model.named_parameters()``, without wrapper prefixes."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield clean_name(name), parameter


def match_names(pattern: str, names: Iterable[str], *, where: str) -> list[str]:
    """The names that a glob matches, in their order; ``*`` stays within one dotted component.

    Args:
        pattern: ``"layers.*.attention.wq"``, or a plain name.
        names: What to choose from.
        where: Who asks, for the error: ``"apply_tp"``.

    Raises:
        ValueError: Nothing matches; names the closest candidate.
    """
    names = list(names)
    parts = pattern.split(".")
    found = [
        name
        for name in names
        if name.count(".") == len(parts) - 1
        and all(fnmatchcase(have, want) for have, want in zip(name.split("."), parts))
    ]
    if not found:
        raise ValueError(f"{where}: {pattern!r} matches nothing{_closest(pattern, names)}")
    return found


def _closest(pattern: str, names: list[str]) -> str:
    # "layers.0.w1" and "layers.1.w1" are one candidate, written the way a plan writes it.
    globs = {".".join("*" if p.isdigit() else p for p in name.split(".")) for name in names if name}
    close = difflib.get_close_matches(pattern, sorted(globs), n=1, cutoff=0.0)
    return f"; closest: {close[0]!r}" if close else ""
