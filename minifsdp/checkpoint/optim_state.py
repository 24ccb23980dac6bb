"""Optimizer state of shards and of whole parameters, so that a checkpoint does not depend on the number of ranks.

State with a value for each element of a shard is gathered and divided in the same way as the elements (contents.py).
State with a single value, such as Adam's step count, applies to every parameter in the shard. ZeRO's buckets and FSDP's
units save and load with these two functions. (torch/distributed/fsdp/_optim_utils.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.checkpoint.sharded_values import copied, is_sharded
from minifsdp.contents import Contents

ONE_PER_PARAMETER = frozenset(["step", "eta", "mu", "mu_product"])
"""What torch.optim keeps once per parameter: of a parameter without dimensions the shape alone does not tell."""

Schema = dict[str, Any]
"""Of each key of a state: the dtype, if there is a value per element; otherwise the value."""


def has_elements(key: str, value: Any, shape: torch.Size) -> bool:
    """True if a state's value has an element for each of its parameter's; else it has one value for all of them."""
    if is_sharded(value):
        return True
    return isinstance(value, Tensor) and (value.dim() > 0 or (value.shape == shape and key not in ONE_PER_PARAMETER))


def is_dtype(kind: Any) -> bool:
    return isinstance(kind, torch.dtype)


def gather_states(
    contents: Contents,
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    schema: Mapping[nn.Parameter, Schema],
    keep: Callable[[Tensor], Any] | None,
) -> list[dict[str, Any]]:
    """The state of each whole parameter in `contents`; to be called on every rank.

    In addition to its result, a rank never holds more whole values than those of one key.

    Args:
        contents: the parameters.
        states: those of this rank's shards.
        schema: of each shard's state, the same on all ranks.
        keep: makes of a whole state what the result has of it: the state is a view of memory that is about to be given
            back. None: this rank takes part and gets nothing.
    """
    kinds = [schema[p] for _, p in sorted((index, p) for p, inside in contents.held().items() for index in inside)]
    kept: list[dict[str, Any]] = [{} for _ in kinds]
    for key, dtype in {pair: None for kind in schema.values() for pair in kind.items() if is_dtype(pair[1])}:
        parts = {p: states[p][key] for p in contents.held() if key in states.get(p, {})}
        buffer, wholes = contents.gather(parts, dtype)
        for own, kind, whole in zip(kept, kinds, wholes, strict=True):
            if keep and kind.get(key) is dtype:
                own[key] = keep(whole)
        device.free(buffer)
    if keep is None:
        return kept
    ordered = zip(kept, kinds, strict=True)
    return [{key: own[key] if is_dtype(k) else copied(k) for key, k in kind.items()} for own, kind in ordered]


def scatter_states(
    contents: Contents,
    names: Sequence[str],
    saved: Sequence[Mapping[str, Any]],
    fetch: Callable[[Any], Tensor] = lambda value: value,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of each of this rank's shards, from those of whole parameters: the reverse of `gather_states`.

    Args:
        contents: the parameters.
        names: theirs, for messages.
        saved: their states, of the same keys on all ranks; a parameter may have none.
        fetch: makes a saved value whole; may communicate: called by all ranks in one order.

    Raises:
        ValueError: with torch's texts: a state has another shape than its parameter; parameters in one shard have
            states that one shard cannot have.
    """
    result: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in contents.held()}
    for key in sorted({key for state in saved for key in state}, key=str):  # `fetch` may communicate
        values = {index: state[key] for index, state in enumerate(saved) if key in state}
        if all(has_elements(key, value, contents.shapes[index]) for index, value in values.items()):
            wholes = {index: fetch(value) for index, value in values.items()}
            for index, whole in wholes.items():
                check_shape(whole, contents.shapes[index], f"{key} of {names[index]}")
            parts: Any = contents.parts_of(wholes)
        else:
            held = contents.held().items()
            parts = {p: _one_value(key, {names[i]: saved[i].get(key) for i in inside}) for p, inside in held}
        for p, inside in contents.held().items():
            if not values.keys().isdisjoint(inside):
                result[p][key] = parts[p]
    return result


def check_shape(whole: Tensor, shape: torch.Size, what: str) -> None:
    """Raise ValueError, in torch's words, if a whole state has another shape than its parameter."""
    if whole.shape != shape:
        raise ValueError(
            f"Tensor optimizer state does not have same shape as its parameter: {whole.shape} {shape}: {what}"
        )


def _one_value(key: str, found: Mapping[str, Any]) -> Any:
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
