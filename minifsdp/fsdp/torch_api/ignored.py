"""Modules and parameters that FSDP ignores: they are not flattened, moved, initialized or reduced."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from minifsdp.fsdp.torch_api.wrapped import Wrapped, instances_in


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that FSDP leaves alone."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()

    def __or__(self, other: Ignored) -> Ignored:
        return Ignored(self.modules | other.modules, self.params | other.params)


def find_ignored(root: nn.Module, modules: Iterable[nn.Module] | None, states: Any) -> Ignored:
    """`ignored_modules` or `ignored_states` with everything under them, and what the units inside `root` ignore.

    Args:
        root: what is to be wrapped.
        modules: modules to leave alone.
        states: modules or parameters to leave alone; or an outer unit's `Ignored`, handed down.

    Raises:
        ValueError: with torch's texts: both are given, or the elements are not all of one kind, or one is a unit.
        TypeError: not an iterable.
    """
    found = _given(modules, states)
    if root in found.modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {root}",
            stacklevel=3,
        )
    for instance in instances_in(root):
        found |= instance._ignored
    return found


def _given(modules: Any, states: Any) -> Ignored:
    if modules is not None and states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    if isinstance(states, Ignored):
        return states
    argument, given = ("ignored_modules", modules) if states is None else ("ignored_states", states)
    if isinstance(given, nn.Module) or not isinstance(given, Iterable | None):
        raise TypeError(f"`{argument}` should be an iterable of `torch.nn.Module`s but got {type(given)}")
    given = list(given or [])
    if any(isinstance(state, Wrapped) for state in given):
        raise ValueError("`ignored_modules` should not include FSDP modules: ignore a module before it is wrapped")
    if all(isinstance(state, nn.Module) for state in given):
        inside = {child for module in given for child in module.modules() if not isinstance(child, Wrapped)}
        return Ignored(frozenset(inside), frozenset(p for module in given for p in module.parameters()))
    if states is not None and all(isinstance(state, nn.Parameter) for state in given):
        return Ignored(params=frozenset(given))
    expected = "nn.Module" if states is None else "all nn.Parameter or all nn.Module"
    kinds = sorted({type(state) for state in given}, key=repr)
    raise ValueError(f"{argument} expects {expected} list elements but got types {kinds}")
