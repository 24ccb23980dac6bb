"""Optimizer states under the parameters' original names.

An optimizer over shards keeps states of the shards' layout; a checkpoint wants them as a single process has them
(fsdp/contents.py). What a state has once per parameter, such as Adam's `step`, is kept once. Beyond its result a rank
never holds more whole values than one unit's for one key (torch/distributed/fsdp/_optim_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from minifsdp import device
from minifsdp.fsdp.torch_api.state.optim_schema import States, UnitNames, agree_on_schema, has_elements, is_dtype
from minifsdp.sharded_values import copied

NamedStates = dict[str, dict[str, Any]]
"""Optimizer states by qualified names."""


# All units of a model


Keep = Callable[[UnitNames, Tensor], Any]
"""What a result has of a whole state, which is a view of memory that is about to be given back."""

Fetch = Callable[[UnitNames | None, Any], Tensor]
"""The whole of a saved value, on any device; may communicate: called by all ranks in the same order."""


def gather_states(managed: Iterable[UnitNames], states: States, keep: Keep | None) -> NamedStates:
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
        kind_of = {name: schema[p] for p, names in one.shards.items() for name in names}
        kept: dict[tuple[str, str], Any] = {}
        for key, dtype in {pair: None for kind in schema.values() for pair in kind.items() if is_dtype(pair[1])}:
            parts = {p: states[p][key] for p in one.unit.shards if key in states.get(p, {})}
            buffer, wholes = one.unit.contents.gather(parts, dtype)
            for name, whole in zip(one.names, wholes, strict=True):
                if keep and kind_of[name].get(key) is dtype:
                    kept[name, key] = keep(one, whole)
            device.free(buffer)
        if keep:
            for name, kind in kind_of.items():
                if kind:
                    result[name] = {k: kept[name, k] if is_dtype(v) else copied(v) for k, v in kind.items()}
    return result


def scatter_states(
    managed: Iterable[UnitNames], saved: Mapping[str, Mapping[str, Any]], fetch: Fetch
) -> dict[nn.Parameter, dict[str, Any]]:
    """This rank's part of saved states: the reverse of `gather_states`.

    Args:
        managed: the units, in the same order on all ranks.
        saved: states by name, the same names and keys on all ranks; a parameter may have none.
        fetch: makes a saved value whole.

    Raises:
        ValueError: with torch's texts: parameters that share a shard here have states that one shard cannot have.
    """
    result: dict[nn.Parameter, dict[str, Any]] = {}
    for one in managed:
        states = {name: saved.get(name, {}) for name in one.names}
        for key in dict.fromkeys(key for state in states.values() for key in state):
            values = {place: states[name][key] for place, name in enumerate(one.names) if key in states[name]}
            if all(has_elements(key, value, one.unit.contents.shapes[place]) for place, value in values.items()):
                wholes = {place: fetch_whole(fetch, one, place, key, states) for place in values}
                parts: Any = one.unit.contents.parts_of(wholes)
            else:
                parts = {
                    p: the_one_value(key, {n: states[n].get(key) for n in names}) for p, names in one.shards.items()
                }
            for p, names in one.shards.items():
                if p.numel() and any(key in states[name] for name in names):
                    result.setdefault(p, {})[key] = parts[p]
    return result


def fetch_whole(fetch: Fetch, one: UnitNames, place: int, key: str, states: Mapping[str, Mapping[str, Any]]) -> Tensor:
    name, shape = one.names[place], one.unit.contents.shapes[place]
    whole = fetch(one, states[name][key])
    if whole.shape != shape:
        raise ValueError(
            f"Tensor optimizer state does not have same shape as its parameter: {whole.shape} {shape}: {key} of {name}"
        )
    return whole


def the_one_value(key: str, found: Mapping[str, Any]) -> Any:
    """The one value of a shard, from all parameters in it."""
    values = {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}
    (first, expected), *others = values.items()
    for name, value in others:
        if value != expected:
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have scalar state with the same "
                f"value and dtype but got values {expected} ({first}) and {value} ({name}) for state {key}: load with "
                "use_orig_params=True, or wrap what was trained for another number of steps as a unit of its own."
            )
    return copied(found[first])
