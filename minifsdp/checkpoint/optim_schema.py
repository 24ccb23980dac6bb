"""The schema of an optimizer's states, on which all ranks agree before the first state is gathered.

A rank that has no element of a parameter has no state for it (`use_orig_params`), and would not know what the others
are about to gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from minifsdp import comm
from minifsdp.checkpoint.optim_state import Schema, has_elements
from minifsdp.checkpoint.sharded_values import copied
from minifsdp.checkpoint.units import Unit
from minifsdp.private import name_of

States = Mapping[nn.Parameter, Mapping[str, Any]]
"""What an optimizer knows of its parameters: `optimizer.state`."""


class UnitNames(NamedTuple):
    """A unit, and the names its parameters have in the model, in the order of its flat parameter."""

    unit: Unit
    names: list[str]
    device_mesh: Any = None

    @property
    def shards(self) -> dict[nn.Parameter, list[str]]:
        """The unit's shards that the optimizer sees, and the original parameters in each."""
        return {p: [self.names[index] for index in inside] for p, inside in self.unit.contents.held().items()}


def agree_on_schema(managed: list[UnitNames], states: States) -> list[dict[nn.Parameter, Schema]]:
    """The schema of each unit's shards, the same on all ranks.

    Raises:
        RuntimeError: some ranks lack states that others have; every rank raises.
        ValueError: a state is of neither kind; every rank raises.
    """
    mine = [
        [
            schema_of(p, states.get(p, {}), names[0]) if p.numel() or not shape.numel() else None
            for (p, names), shape in zip(one.shards.items(), one.unit.contents.shapes, strict=False)
        ]
        for one in managed
    ]
    groups = {one.unit.group for one in managed if one.unit.contents.ranks > 1}
    of_ranks = {group: comm.gather_objects(mine, group) for group in sorted(groups, key=name_of)}
    agreed = []
    for i, one in enumerate(managed):
        of_unit = [schema[i] for schema in (of_ranks[one.unit.group] if one.unit.contents.ranks > 1 else [mine])]
        of_shards = zip(one.shards.items(), zip(*of_unit, strict=True), strict=True)
        agreed.append({p: agreed_schema(names, schema) for (p, names), schema in of_shards})
    return agreed


def schema_of(p: nn.Parameter, state: Mapping[str, Any], name: str) -> Schema:
    """This rank's schema of a parameter, with an error for a state of neither kind."""
    schema: Schema = {}
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


def agreed_schema(names: list[str], of_ranks: Iterable[Schema | None]) -> Schema:
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
