"""The states of all units of a model, under the original parameters' names (optim_state.py, for each unit)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from minifsdp.checkpoint.optim_schema import States, UnitNames, agree_on_schema
from minifsdp.checkpoint.optim_state import gather_states, scatter_states

NamedStates = dict[str, dict[str, Any]]
"""Optimizer states by qualified names."""

Keep = Callable[[UnitNames, Tensor], Any]
"""What a result has of a whole state, which is a view of memory that is about to be given back."""

Fetch = Callable[[UnitNames | None, Any], Tensor]
"""The whole of a saved value, on any device; may communicate: called by all ranks in the same order."""


def gather_named_states(managed: Iterable[UnitNames], states: States, keep: Keep | None) -> NamedStates:
    """The states of all units' parameters by name; to be called on every rank.

    Args:
        managed: the units, in the same order on all ranks.
        states: those of this rank's shards.
        keep: makes of a whole state what the result has of it; None: this rank takes part and gets nothing.

    Raises:
        RuntimeError: some ranks lack states that others have; every rank raises.
        ValueError: a state is of neither kind: not of its parameter's shape, and not one value.
    """
    managed = list(managed)
    result: NamedStates = {}
    for one, schema in zip(managed, agree_on_schema(managed, states), strict=True):
        found = gather_states(one.unit.contents, states, schema, partial(keep, one) if keep else None)
        result |= {name: state for name, state in zip(one.names, found, strict=True) if state}
    return result


def scatter_named_states(
    managed: Iterable[UnitNames], saved: Mapping[str, Mapping[str, Any]], fetch: Fetch
) -> dict[nn.Parameter, dict[str, Any]]:
    """This rank's part of saved states: the reverse of `gather_named_states`.

    Args:
        managed: the units, in the same order on all ranks.
        saved: states by name, the same names and keys on all ranks; a parameter may have none.
        fetch: makes a saved value whole.

    Raises:
        ValueError: as `scatter_states`.
    """
    result: dict[nn.Parameter, dict[str, Any]] = {}
    for one in managed:
        states = [saved.get(name, {}) for name in one.names]
        scattered = scatter_states(one.unit.contents, one.names, states, partial(fetch, one))
        shapes = zip(one.unit.shards, one.unit.contents.shapes, strict=False)
        here = {p for p, shape in shapes if p.numel() or not shape.numel()}
        result |= {p: state for p, state in scattered.items() if p in here and state}
    return result
