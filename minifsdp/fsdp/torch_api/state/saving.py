"""State dicts of whole parameters (FULL), of this rank's rows of each parameter (SHARDED), and of shards (LOCAL).

The first two proceed unit by unit. A unit is whole while its values are read, so that apart from the returned values,
never more than one unit and the units around it are whole (torch/distributed/fsdp/_state_dict_utils.py,
`_full_post_state_dict_hook`). Any number of ranks can load the rows that `torch.distributed.checkpoint` has saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifsdp.checkpoint.forms import StateDictType
from minifsdp.checkpoint.sharded_values import copied, is_sharded, shard_value, sharded_tensor, storage_of
from minifsdp.fsdp.torch_api.state.summon import Summon, exposed
from minifsdp.fsdp.torch_api.wrapped import Wrapped
from minifsdp.private import ASKED_BY_STATE_DICT_FUNCTIONS
from minifsdp.wrapper_names import FLAT_PARAM, clean_name

State = dict[str, Any]


def save(instance: Wrapped, destination: Any, prefix: str, keep_vars: bool) -> State:
    """The state dict of a wrapped module, of the type chosen for it."""
    kind = instance.kind_of_state()
    instance._saves = True
    try:
        if kind is StateDictType.LOCAL_STATE_DICT:
            return save_local(instance, destination, prefix, keep_vars)
        return save_named(instance, kind, destination, prefix, keep_vars)
    finally:
        instance._saves = False


def save_named(instance: Wrapped, kind: StateDictType, destination: Any, prefix: str, keep_vars: bool) -> State:
    """FULL and SHARDED: under the original names, all values of the unit copied.

    Args:
        instance: wraps the module.
        kind: FULL, with `rank0_only` on rank 0 alone: elsewhere nothing is added to `destination`; or SHARDED, where
            a value is a ShardedTensor, or with a device mesh a DTensor.
        destination, prefix, keep_vars: those of `torch.nn.Module.state_dict`.
    """
    config, wrapped = (instance._settings.state_dict_config, instance._fsdp_wrapped_module)
    how = Summon(rank0_only=getattr(config, "rank0_only", False))
    make_value: Callable[[Tensor], Any] = partial(copied, to_cpu=config.offload_to_cpu)
    if kind is StateDictType.SHARDED_STATE_DICT:
        group, mesh = instance.process_group, instance._device_mesh
        make_value = partial(shard_value, group=group, device_mesh=mesh, to_cpu=config.offload_to_cpu)
    with exposed(instance, how):
        if not how.is_for(instance.rank):
            wrapped.state_dict(prefix=prefix)  # the units inside take part in their gathers
            return OrderedDict() if destination is None else destination
        state: State = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        memory = {storage_of(getattr(place.module, place.attribute)) for place in instance._places}
        for name, value in state.items():
            if storage_of(value) in memory:
                state[name] = make_value(value)
    return state


def save_local(instance: Wrapped, destination: Any, prefix: str, keep_vars: bool) -> State:
    """LOCAL: the flat shard as is, of use only to the same model on the same ranks; no communication.

    It is a ShardedTensor [numel] of the flat parameter for each unit, which shares its memory, without padding.

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
    unit = instance._unit
    if unit is not None:
        unit.view.refresh()
    wrapped = instance._fsdp_wrapped_module
    state: State = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if unit is None:
        return state
    local, total = unit.contents.without_padding()
    rows = unit.contents.shard.numel()
    for name, value in list(state.items()):  # the flat parameter, or with use_orig_params slices of it
        if storage_of(value) == storage_of(local):
            del state[name]
    if instance._settings.state_dict_config.offload_to_cpu:
        local = copied(local, to_cpu=True)
    state[prefix + FLAT_PARAM] = sharded_tensor(local, rows, torch.Size([total]), unit.group)
    return state


def refuse_past_wrapper(instance: Wrapped) -> None:
    """Have the modules of a unit refuse a `state_dict` that is not the instance's."""
    for module in {instance.module, *(place.module for place in instance._places)}:
        module.register_state_dict_pre_hook(instance._refuse_shards)


def refuse_torchs_functions(asked_for: str) -> None:
    """Raise RuntimeError where an attribute is asked for by functions that take an FSDP of ours for a plain module."""
    if asked_for == ASKED_BY_STATE_DICT_FUNCTIONS:
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict knows no FSDP but torch's, and would take a rank's shard for the "
            "whole: import get_state_dict, set_state_dict and their like from minifsdp.checkpoint"
        )


def restore_buffers(instance: Wrapped, state: State, prefix: str, to_cpu: bool) -> None:
    """Cast back what was cast; with `to_cpu`, move to the host what is not there: all under `prefix`."""
    cast, wrapped = instance._buffer_dtypes, instance._fsdp_wrapped_module
    for path, module in wrapped.named_modules(remove_duplicate=False) if cast else ():
        for attribute in module._buffers:
            name = prefix + clean_name(f"{path}.{attribute}" if path else attribute)
            dtype = cast.get((module, attribute))
            if dtype is not None and name in state:
                state[name] = state[name].to(dtype)
    if to_cpu:
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and not is_sharded(value):
                state[name] = value.cpu()
