"""Optimizer state between shards and whole parameters, so that a checkpoint does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.zero.bucket import Bucket

State = Mapping[Tensor, dict[str, Any]]

_ONE_PER_PARAMETER = {"step", "eta", "mu", "mu_product"}  # state that torch.optim keeps as a scalar, not per element


def cut_state(bucket: Bucket, shard: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each parameter's part of the shard, from that of the shard.

    What has the shard's shape [padded / N] is cut into views; anything else, such as Adam's step count, belongs to
    each parameter alike.
    """
    states: list[dict[str, Any]] = [{} for _ in bucket.params]
    for name, value in shard.items():
        is_elementwise = isinstance(value, Tensor) and value.shape == bucket.shard.shape
        parts = bucket.cut(value) if is_elementwise else [value] * len(states)
        for own, part in zip(states, parts, strict=True):
            own[name] = part
    return states


def join_state(bucket: Bucket, states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The inverse of `cut_state`; None if the parameters' states differ in more than their elements."""
    first, *others = states
    if any(own.keys() != first.keys() for own in others):
        return None
    shard = {}
    for name, value in first.items():
        values = [own[name] for own in states]
        if isinstance(value, Tensor) and value.dim() > 0:
            padding = value.new_zeros(bucket.shard.numel() - sum(part.numel() for part in values))
            shard[name] = torch.cat([*values, padding])
        elif any(other != value for other in values):
            return None
        else:
            shard[name] = value
    return shard


def gather_state(bucket: Bucket, state: State) -> dict[Tensor, dict[str, Any]]:
    """The state of the bucket's whole parameters, from every rank's `state` of what it updates. Collective.

    A parameter that has never had a gradient has none, as under any torch optimizer.
    """
    if bucket.is_split:
        states = [state.get(part, {}) for part in bucket.updated]
    else:
        states = cut_state(bucket, state.get(bucket.shard, {}))
    whole: dict[Tensor, dict[str, Any]] = {p: copy_state(own) for p, own in zip(bucket.params, states, strict=True)}
    for name in dict.fromkeys(name for own in states for name in own):
        held = {p: own[name] for p, own in zip(bucket.params, states, strict=True) if name in own}
        value = next(iter(held.values()))
        if isinstance(value, Tensor) and value.dim() > 0:
            flat = device.empty(bucket.padded, value.dtype, "communication", value.device)
            mine = flat.chunk(bucket.group.size())[bucket.group.rank()].zero_()
            for p, part in zip(bucket.params, bucket.cut(mine), strict=True):
                if p in held:
                    part.copy_(held[p])
            comm.all_gather(flat, mine, bucket.group).wait()
            for p, view in zip(bucket.params, bucket.split(flat), strict=True):
                if p in held:
                    whole[p][name] = view.clone()
            device.free(flat)
    return {p: own for p, own in whole.items() if own}


def shard_state(bucket: Bucket, state: State) -> list[dict[str, Any]]:
    """The state of each parameter's part of this rank's shard, cut from the `state` of whole parameters.

    Raises:
        ValueError: a tensor is neither a scalar nor of its parameter's shape.
    """
    states: list[dict[str, Any]] = [{} for _ in bucket.params]
    for name in dict.fromkeys(name for p in bucket.params for name in state.get(p, {})):
        held: dict[Tensor, Any] = {p: state[p][name] for p in bucket.params if name in state.get(p, {})}
        parts = [_copy(held.get(p)) for p in bucket.params]
        if _is_elementwise(name, held):
            flat = next(iter(held.values())).new_zeros(bucket.padded)
            for p, view in zip(bucket.params, bucket.split(flat), strict=True):
                if p in held:
                    view.copy_(held[p])
            parts = [part.clone() for part in bucket.cut(flat.chunk(bucket.group.size())[bucket.group.rank()])]
        for p, own, part in zip(bucket.params, states, parts, strict=True):
            if p in held:
                own[name] = part
    return states


def copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors of its own."""
    return {name: _copy(value) for name, value in state.items()}


def _is_elementwise(name: str, values: dict[Tensor, Any]) -> bool:
    """True if `name` is kept per element; for a scalar parameter the shape is ambiguous, so known names decide."""
    if name in _ONE_PER_PARAMETER or not all(isinstance(value, Tensor) for value in values.values()):
        return False
    for p, value in values.items():
        if value.dim() > 0 and value.shape != p.shape:
            raise ValueError(f"{name!r} has shape {list(value.shape)}, its parameter {list(p.shape)}: another model's?")
    return all(value.shape == p.shape for p, value in values.items())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
