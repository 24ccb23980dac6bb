"""The parameters and gradients of each unit that a rank holds at this moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED, Unit
from minifsdp.fsdp2.hooks import module_groups_in, units_of
from minifsdp.gpt import Block

Parameters = Literal["shard", "on its way", "whole"]
Gradient = Literal["none", "whole", "on its way", "shard"]
Holding = tuple[Parameters, Gradient]

_STAGE = re.compile(r"^stages\.\d+\.")
_PARAMETERS: dict[Any, Parameters] = {SHARDED: "shard", GATHERING: "on its way", UNSHARDED: "whole"}


@dataclass(frozen=True)
class Holdings:
    """The rows of the explorer and their state.

    Attributes:
        names: by row, the unit's name.
        look: returns what this rank holds of each; it reads states only, and may be called at any moment.
    """

    names: list[str]
    look: Callable[[], list[Holding]]


def holdings_of(model: nn.Module, optimizer: Any = None) -> Holdings:
    """The holdings of an FSDP model by units; of another by its blocks and the rest, whose parameters stay as they are:
    whole, or with tensor parallelism this rank's parts.

    A learner's model has `units`, whose members have a `name` and say in `held` what this rank holds of them.
    """
    instances = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]
    if units := [each._unit for each in instances if each._unit is not None] or units_of(module_groups_in(model)):
        return of_units(units)
    if own := [each for each in getattr(model, "units", ()) if hasattr(each, "held")]:
        return Holdings([each.name for each in own], lambda: [each.held for each in own])
    named = {path: each for path, each in model.named_modules() if isinstance(each, Block)}
    blocks = list(named.values())
    inside = {p for block in blocks for p in block.parameters()}
    rows = [[p for p in model.parameters() if p not in inside], *(list(block.parameters()) for block in blocks)]
    buckets = getattr(optimizer, "buckets", [])
    parts: Any = "shard" if any(isinstance(p, DTensor) for p in inside) else "whole"

    def look() -> list[Holding]:
        used = optimizer.parameters_with_gradients() if buckets else ()
        sharded = {p for bucket in buckets if bucket.shard.grad is not None for p in bucket.params}
        return [(parts, _gradient(row, used, sharded, parts)) for row in rows]

    return Holdings(["root", *(".".join(path.split(".")[-2:]) for path in named)], look)


def of_units(units: Sequence[Unit]) -> Holdings:
    """The holdings of units, or of anything else with a unit's state, gradient, shards and title."""
    return Holdings([_name(unit) for unit in units], lambda: [_of_unit(unit) for unit in units])


def _name(unit: Unit) -> str:
    """Its path in the model, without the class and a pipeline's stage: `stages.0.blocks.1 (Block)` as `blocks.1`."""
    return _STAGE.sub("", unit.title.split(" (")[0])


def _of_unit(unit: Unit) -> Holding:
    parameters = _PARAMETERS[unit.state]
    if unit.is_reducing:
        return parameters, "on its way"
    if unit.has_gradient:
        return parameters, "whole"
    return parameters, "shard" if any(shard.grad is not None for shard in unit.shards) else "none"


def _gradient(row: Sequence[nn.Parameter], used: Any, sharded: set[Any], made: Gradient) -> Gradient:
    if any(p.grad is not None or (p in used and p not in sharded) for p in row):
        return made
    return "shard" if any(p in sharded for p in row) else "none"
