"""SHARDED: each parameter by itself under its original name, cut along dimension 0 over the ranks.

What `torch.distributed.checkpoint` saves from this, any number of ranks can load.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from minifsdp.fsdp.state.full import save_whole
from minifsdp.fsdp.state.names import clean_name
from minifsdp.fsdp.state.summon import Summon
from minifsdp.fsdp.state.values import full_value, is_sharded, shard_value

if TYPE_CHECKING:
    from minifsdp.fsdp.state.methods import StateMethods


def save(instance: StateMethods, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """This rank's rows of every parameter: a ShardedTensor, or with a device mesh a DTensor."""
    group, mesh, config = instance.process_group, instance._device_mesh, instance._settings.state_dict_config
    make_value = partial(shard_value, group=group, device_mesh=mesh, to_cpu=config.offload_to_cpu)
    return save_whole(instance, Summon(), make_value, destination, prefix, keep_vars)


def gather_values(instance: StateMethods, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace the values of the unit's parameters by whole ones, to be loaded as a full state dict's.

    One all-gather per parameter. A value that is whole, as that of a full state dict, stays.
    """
    for place in [] if instance._unit is None else [place for users in instance._unit.places for place in users]:
        name = prefix + clean_name(place.name)
        if is_sharded(state.get(name)):
            try:
                state[name] = full_value(state[name], instance.process_group, instance.compute_device)
            except RuntimeError as error:
                errors.append(f"{name}: {error}")
                del state[name]
