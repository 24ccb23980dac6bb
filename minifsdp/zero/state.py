"""Conversion of ZeRO's optimizer state between a bucket's shard, or parameters' parts of it, and whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from minifsdp.checkpoint.optim_state import check_shape, gather_states, has_elements, scatter_states
from minifsdp.checkpoint.sharded_values import copied
from minifsdp.local_parts import groups_of, like, local_of
from minifsdp.zero.bucket import Bucket

State = Mapping[Tensor, Mapping[str, Any]]


def gather_state(bucket: Bucket, state: State) -> dict[Tensor, dict[str, Any]]:
    """The state of the bucket's whole parameters, from every rank's `state` of what it updates. Collective.

    A parameter that has never had a gradient has none, as under any torch optimizer.
    """
    mine = {p: state.get(p, {}) for p in bucket.shards}
    schema = {
        p: {key: value.dtype if has_elements(key, value, p.shape) else value for key, value in own.items()}
        for p, own in mine.items()
    }
    wholes = gather_states(bucket.contents, mine, schema, copied)
    return {
        p: {key: like(value, p) if has_elements(key, value, local_of(p).shape) else value for key, value in own.items()}
        for p, own in zip(bucket.params, wholes, strict=True)
        if own
    }


def check_state(bucket: Bucket, state: State) -> None:
    """Check the `state` of whole parameters before any of it is loaded.

    Raises:
        ValueError: a tensor is neither a scalar nor of its parameter's shape.
    """
    for p, name in zip(bucket.params, bucket.names, strict=True):
        for key, value in state.get(p, {}).items():
            if has_elements(key, value, p.shape):
                check_shape(value, p.shape, f"{key} of {name}")
                if groups_of(p) and value is local_of(value):
                    raise ValueError(f"{key} of {name} is a plain tensor: load the DTensor that state_dict returned")


def scatter_state(bucket: Bucket, state: State) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of what this rank updates of the bucket, from the `state` of whole parameters."""
    local = [
        {key: local_of(value) if isinstance(value, Tensor) else value for key, value in state.get(p, {}).items()}
        for p in bucket.params
    ]
    return scatter_states(bucket.contents, bucket.names, local)


def can_share(bucket: Bucket, state: State) -> bool:
    """True if the bucket's parameters can share one state: the same keys and, for example, the same step count."""
    first, *others = (
        {key: None if has_elements(key, value, p.shape) else value for key, value in state.get(p, {}).items()}
        for p in bucket.params
    )
    return all(own == first for own in others)


def cut_state(bucket: Bucket, shard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state of each parameter's part of the shard, from that of the shard."""
    states: list[dict[str, Any]] = [{} for _ in bucket.params]
    for key, value in shard.items():
        elementwise = has_elements(key, value, bucket.shard.shape)
        parts = bucket.cut(value) if elementwise else [value] * len(states)
        for own, part in zip(states, parts, strict=True):
            own[key] = copied(part)
    return states
