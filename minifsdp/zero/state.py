"""Optimizer state between shards and whole parameters, so that a checkpoint does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minifsdp import comm, device

if TYPE_CHECKING:
    from minifsdp.zero.partition import Bucket

State = Mapping[Tensor, dict[str, Any]]

_ONE_PER_PARAMETER = {"step", "eta", "mu", "mu_product"}  # state that torch.optim keeps as a scalar, not per element


def gather_state(bucket: Bucket, state: State) -> dict[Tensor, dict[str, Any]]:
    """The state of the bucket's whole parameters, from every rank's `state` of its shard. Collective.

    What has the shard's shape [padded / N] is gathered and cut into the parameters' shapes; anything else, such as
    Adam's step count, belongs to each parameter alike.
    """
    whole: dict[Tensor, dict[str, Any]] = {}
    for name, value in state.get(bucket.shard, {}).items():
        if isinstance(value, Tensor) and value.shape == bucket.shard.shape:
            flat = device.empty(bucket.padded, value.dtype, "communication", value.device)
            comm.all_gather(flat, value, bucket.group).wait()
            values = [view.clone() for view in bucket.split(flat)]
            device.free(flat)
        else:
            values = [_copy(value) for _ in bucket.params]
        for p, own in zip(bucket.params, values, strict=True):
            whole.setdefault(p, {})[name] = own
    return whole


def shard_state(bucket: Bucket, state: State) -> dict[str, Any]:
    """The state of this rank's shard, cut from the `state` of whole parameters: the inverse of `gather_state`.

    A parameter without state has never been updated by a plain optimizer; here its gradients would have been zeros, so
    zeros are what its part of the shard's state is.
    """
    held = {p: state[p] for p in bucket.params if p in state}
    names = dict.fromkeys(name for values in held.values() for name in values)
    return {
        name: _shard_one(bucket, name, {p: own[name] for p, own in held.items() if own.get(name) is not None})
        for name in names
    }


def _shard_one(bucket: Bucket, name: str, values: dict[Tensor, Any]) -> Any:
    if not values:
        return None
    if _is_elementwise(name, values):
        flat = next(iter(values.values())).new_zeros(bucket.padded)
        for param, view in zip(bucket.params, bucket.split(flat), strict=True):
            if param in values:
                view.copy_(values[param])
        return flat.chunk(bucket.group.size())[bucket.group.rank()].clone()
    first = next(iter(values.values()))
    for p, value in values.items():
        if value != first:
            raise ValueError(
                f"{name!r} is {value} for a parameter {list(p.shape)} and {first} for another of its bucket, "
                "which can have but one: give them parameter groups of their own"
            )
    return _copy(first)


def _is_elementwise(name: str, values: dict[Tensor, Any]) -> bool:
    """Whether `name` is kept per element; for a scalar parameter the shape does not tell, so known names do."""
    if name in _ONE_PER_PARAMETER or not all(isinstance(value, Tensor) for value in values.values()):
        return False
    for p, value in values.items():
        if value.dim() > 0 and value.shape != p.shape:
            raise ValueError(f"{name!r} has shape {list(value.shape)}, its parameter {list(p.shape)}: another model's?")
    return all(value.shape == p.shape for p, value in values.items())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
