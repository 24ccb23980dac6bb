"""The schema of an optimizer's states, agreed upon by all ranks before the first of them is gathered.

A rank that has no element of a parameter has no state of it (`use_orig_params`), and would not know what the others
are about to gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.private import name_of
from minifsdp.sharded_values import copied, is_sharded

States = Mapping[nn.Parameter, Mapping[str, Any]]
"""What an optimizer knows of its parameters: `optimizer.state`."""

STEP = "step"  # the one key that torch.optim itself treats as a number, whatever shape the parameter has


class UnitNames(NamedTuple):
    """A unit, and the names its parameters have in the model, in the order of its flat parameter."""

    unit: FlatUnit
    names: list[str]
    device_mesh: Any = None

    @property
    def shards(self) -> dict[nn.Parameter, list[str]]:
        """The unit's shards that the optimizer sees, and the original parameters in each."""
        return {p: [self.names[index] for index in inside] for p, inside in self.unit.contents.held().items()}


StateSchema = dict[str, Any]
"""Of each key of a state: the dtype, if there is a value per element; otherwise the value."""


def has_elements(key: str, value: Any, shape: torch.Size) -> bool:
    """True if a state's value has an element for each of its parameter's; else it has one value for all of them."""
    if is_sharded(value):
        return True
    return isinstance(value, Tensor) and (value.dim() > 0 or (value.shape == shape and key != STEP))


def is_dtype(kind: Any) -> bool:
    return isinstance(kind, torch.dtype)


def agree_on_schema(managed: list[UnitNames], states: States) -> list[dict[nn.Parameter, StateSchema]]:
    """The schema of each unit's shards, the same on all ranks.

    Raises:
        RuntimeError: some ranks lack states that others have; every rank raises.
        ValueError: a state is of neither kind; every rank raises.
    """
    mine = [[schema_of(p, states.get(p, {}), names[0]) for p, names in one.shards.items()] for one in managed]
    groups = {one.unit.group for one in managed if one.unit.contents.ranks > 1}
    of_ranks = {group: comm.gather_objects(mine, group) for group in sorted(groups, key=name_of)}
    agreed = []
    for i, one in enumerate(managed):
        of_unit = [schema[i] for schema in (of_ranks[one.unit.group] if one.unit.contents.ranks > 1 else [mine])]
        of_shards = zip(one.shards.items(), zip(*of_unit, strict=True), strict=True)
        agreed.append({p: agreed_schema(names, schema) for (p, names), schema in of_shards})
    return agreed


def schema_of(p: nn.Parameter, state: Mapping[str, Any], name: str) -> StateSchema | None:
    """This rank's schema of a parameter; None if it has no element of it; an error for a state of neither kind."""
    if p.numel() == 0:
        return None
    schema: StateSchema = {}
    for key, value in state.items():
        if not has_elements(key, value, p.shape):
            schema[key] = copied(value, to_cpu=True)
        elif value.shape == p.shape:
            schema[key] = value.dtype
        else:
            schema[key] = ValueError(
                f"Tensor optimizer state does not have same shape as its parameter: {tuple(value.shape)} "
                f"{tuple(p.shape)}: {key} of {name}. An optimizer over shards can have states of one value per "
                "element or one per parameter, no others."
            )
    return schema


def agreed_schema(names: list[str], of_ranks: Iterable[StateSchema | None]) -> StateSchema:
    """The schema of all ranks that have elements of a parameter, which must be the same."""
    there = {rank: schema for rank, schema in enumerate(of_ranks) if schema is not None}
    union = {key: kind for schema in there.values() for key, kind in schema.items()}
    for error in (kind for kind in union.values() if isinstance(kind, ValueError)):
        raise error
    lacking = [rank for rank, schema in there.items() if schema.keys() != union.keys()]
    if lacking:
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            "some ranks are missing some of those states"
            + "".join(f"\nRank {rank} is missing states for the parameters: {names}" for rank in lacking)
            + "\nStep the optimizer on every rank, and leave the gradients of shards alone."
        )
    return union
