"""LOCAL: the flat shard as it lies. No communication, and good for nothing but the same model on the same ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifsdp.fsdp.orig_params import OrigParamsUnit
from minifsdp.fsdp.state.full import storage_of
from minifsdp.fsdp.state.names import FLAT_PARAM, WRAPPED, clean_name
from minifsdp.fsdp.state.values import copy_value, is_sharded, local_rows, sharded_tensor

if TYPE_CHECKING:
    from minifsdp.fsdp.state.methods import StateMethods


def save(instance: StateMethods, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """A ShardedTensor [numel] of the flat parameter for each unit, which shares its memory; the padding left out.

    Raises:
        RuntimeError: with torch's text, there is a device mesh.
        AssertionError: the parameters are whole at present.
    """
    if instance._device_mesh is not None:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. "
            "Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict."
        )
    if instance._summoned is not None:
        raise AssertionError("a local state dict is of sharded parameters: leave summon_full_params first")
    unit, wrapped = instance._unit, instance._modules[WRAPPED]
    assert wrapped is not None
    if isinstance(unit, OrigParamsUnit):
        unit.write_back()
    state: dict[str, Any] = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if unit is None:
        return state
    shard, rank, group = unit.flat.shard.detach(), unit.flat.rank, unit.group
    for name, value in list(state.items()):  # the flat parameter, or with use_orig_params slices of it
        if isinstance(value, Tensor) and not is_sharded(value) and storage_of(value) == storage_of(shard):
            del state[name]
    local = shard[: max(0, unit.flat.numel - rank * len(shard))]
    if instance._settings.state_dict_config.offload_to_cpu:
        local = copy_value(local, to_cpu=True)
    state[prefix + FLAT_PARAM] = sharded_tensor(local, len(shard), torch.Size([unit.flat.numel]), group)
    return state


def load(instance: StateMethods, state: dict[str, Any], prefix: str) -> None:
    """Copy the flat shard in `state` to the unit's, and put in its place what `load_state_dict` looks for.

    Raises:
        AssertionError: with torch's texts, there is none, or it is not a ShardedTensor.
        RuntimeError: it is another model's, or cut for another number of ranks.
    """
    unit, name = instance._unit, prefix + FLAT_PARAM
    if unit is None:
        return
    of = type(instance.module).__name__
    if name not in state:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            f"there is no {name} for {of}. Is it a local state dict, of a model wrapped like this one?"
        )
    value, shard = state.pop(name), unit.flat.shard.data
    if is_sharded(value) and value.metadata().size[0] != unit.flat.numel:
        raise RuntimeError(
            f"{name} has {value.metadata().size[0]} elements, the unit of {of} {unit.flat.numel}: a local state dict "
            "loads into the same model, wrapped in the same way"
        )
    for part in local_rows(value, len(shard), unit.group):
        shard[: len(part)].copy_(part)
    if FLAT_PARAM in instance.module._parameters:
        state[name] = shard
    else:
        for users, p in zip(unit.places, unit.shards, strict=True):
            state.update({prefix + clean_name(place.name): p.data for place in users})
