"""Modules and parameters that FSDP leaves alone: not flattened, not moved, not reduced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Ignored:
    """What to leave alone."""

    modules: frozenset[nn.Module] = field(default_factory=frozenset)
    params: frozenset[nn.Parameter] = field(default_factory=frozenset)


def find_ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> Ignored:
    """`ignored_modules` and `ignored_states` with everything under them.

    Raises:
        ValueError: with torch's texts: both are given, or the elements are not all of one kind.
    """
    if modules is not None and states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    given = list(states if states is not None else modules or [])
    kinds = sorted({type(state) for state in given}, key=repr)
    if all(isinstance(state, nn.Module) for state in given):
        inside = frozenset(child for module in given for child in module.modules())
        return Ignored(inside, frozenset(p for module in given for p in module.parameters()))
    if modules is not None:
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {kinds}")
    if all(isinstance(state, nn.Parameter) for state in given):
        return Ignored(params=frozenset(given))
    raise ValueError(f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {kinds}")
