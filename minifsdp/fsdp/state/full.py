"""FULL: the wrapped model's state dict as if nothing had been wrapped.

Unit by unit: whole while its values are read, so that beside what is returned there are never more than one unit and
those around it whole (torch/distributed/fsdp/_state_dict_utils.py, `_full_post_state_dict_hook`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifsdp.fsdp.state.names import WRAPPED
from minifsdp.fsdp.state.summon import Summon, exposed
from minifsdp.fsdp.state.values import copy_value, is_sharded

if TYPE_CHECKING:
    from minifsdp.fsdp.state.methods import StateMethods


def save(instance: StateMethods, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """Whole values, copied: a unit's memory goes when it is sharded again."""
    config = instance._settings.state_dict_config
    how = Summon(rank0_only=getattr(config, "rank0_only", False))
    return save_whole(instance, how, lambda p: copy_value(p, config.offload_to_cpu), destination, prefix, keep_vars)


def save_whole(
    instance: StateMethods,
    how: Summon,
    make_value: Callable[[Tensor], Any],
    destination: Any,
    prefix: str,
    keep_vars: bool,
) -> dict[str, Any]:
    """The state dict of a wrapped module, with `make_value` of each whole parameter of its unit.

    Args:
        instance: wraps the module.
        how: who gets it; nothing is added to `destination` elsewhere.
        make_value: what stands for a parameter, which is gone afterwards.
        destination, prefix, keep_vars: those of `torch.nn.Module.state_dict`.
    """
    unit, wrapped = instance._unit, instance._modules[WRAPPED]
    assert wrapped is not None
    with exposed(instance, how):
        if not how.is_for(instance.rank):
            wrapped.state_dict(prefix=prefix)  # the units inside take part in their gathers
            return OrderedDict() if destination is None else destination
        state: dict[str, Any] = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        places = [] if unit is None else [place for users in unit.places for place in users]
        memory = {storage_of(getattr(place.module, place.attribute)) for place in places}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and storage_of(value) in memory:
                state[name] = make_value(value)
    return state


def storage_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins; no place if it has no storage, as a sparse one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1
