"""An optimizer's state dict, keyed by the original parameters' names instead of the shards' numbers, and back.

    {"state": {0: {...}}, "param_groups": [{"lr": ..., "params": [0]}]}                     optimizer.state_dict()
    {"state": {"a.weight": {...}, "a.bias": {...}}, "param_groups": [{..., "params": ["a.weight", "a.bias"]}]}

The second form is what one process has, but for its names (torch/distributed/fsdp/_optim_utils.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.fsdp.state.from_rank_0 import receive
from minifsdp.fsdp.state.methods import StateMethods
from minifsdp.fsdp.state.optim import gather_states, scatter_states
from minifsdp.fsdp.state.optim_kinds import Managed, copied
from minifsdp.fsdp.state.optim_names import (
    check_known,
    find_managed,
    keys_of,
    match_groups,
    parameter_names,
    parameters_of,
    settings_of,
)
from minifsdp.fsdp.state.values import copy_value, full_value, is_sharded, shard_value

# Saving


def to_names(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    full: bool,
    rank0_only: bool,
    to_cpu: bool,
    group: Group | None,
) -> dict[str, Any]:
    """`state_dict` of an optimizer over shards, with whole or sharded states by name; collective.

    Args:
        full: whole states; otherwise each is sharded by itself.
        rank0_only: the other ranks of `group` get an empty dict.
        to_cpu: the states are in host memory.
        group: default: the ranks that the model is sharded over; all ranks, if it is replicated too.
    """
    params, managed = parameters_of(optim), find_managed(model)
    names = parameter_names(model, managed)
    check_known(params, names)
    keys = keys_of(model, params, is_named=isinstance(next(iter(state_dict["state"]), None), str))
    states = {p: state_dict["state"][keys[p]] for p in params if keys[p] in state_dict["state"]}

    def keep(one: Managed, whole: Tensor) -> Any:
        if full or one.unit.flat.ranks == 1:
            return copy_value(whole, to_cpu)
        return shard_value(whole, one.unit.group, one.device_mesh, to_cpu)

    kept = not rank0_only or group_of(model, group).rank() == 0
    gathered = gather_states(managed, states, keep if kept else None)
    if not kept:
        return {}
    units = {p for one in managed for p in one.unit.shards}
    for p in (p for p in states if p not in units):
        gathered[names[p][0]] = {key: copied(value, to_cpu) for key, value in states[p].items()}
    ordered = {name: gathered[name] for p in params for name in names[p] if name in gathered}
    for key in set(state_dict["state"]) - {keys[p] for p in params}:
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the returned "
            "state_dict. In most cases, this is a user-defined state that is not associated with any particular "
            "parameter.",
            stacklevel=3,
        )
        ordered[key] = state_dict["state"][key]
    result: dict[str, Any] = {"state": ordered}
    if "param_groups" in state_dict:
        result["param_groups"] = []
        for saved, ours in zip(state_dict["param_groups"], optim.param_groups, strict=True):
            inside = [name for p in ours["params"] for name in names[p]]
            named = {"param_names": list(inside)} if "param_names" in saved else {}  # made from `named_parameters()`
            result["param_groups"].append(settings_of(saved) | {"params": inside} | named)
    return result


def group_of(model: nn.Module, group: Group | None) -> Group:
    """`group`, or the ranks that have the model between them."""
    first = next(iter(StateMethods.fsdp_modules(model)), None)
    if first is None or first.sharding_strategy.is_hybrid:
        return comm.world(group)
    return group or first.process_group


# Loading


def from_names(
    model: nn.Module, optim: Optimizer, state_dict: Mapping[str, Any], *, is_named: bool, source: Group | None
) -> dict[str, Any]:
    """What `optim` can load: this rank's part of `state_dict`, which has whole or sharded states by name.

    Args:
        is_named: the optimizer's own state dict has names for keys.
        source: `state_dict` comes from `outline_from_rank_0`, and rank 0 sends each state when its turn comes.
    """
    params, managed = parameters_of(optim), find_managed(model)
    names = parameter_names(model, managed)
    check_known(params, names)
    check_saved(state_dict)
    saved = state_dict["state"]

    def fetch(one: Managed | None, value: Any) -> Any:
        if one is not None and is_sharded(value):
            return full_value(value, one.unit.group, one.unit.device)
        if source is None:
            return value
        return receive(value, source, one.unit.device if one else comm.compute_device(None, params, source))

    mine = [one for one in managed if not set(params).isdisjoint(one.unit.shards)]
    states = scatter_states(mine, saved, fetch)
    units = {p for one in managed for p in one.unit.shards}
    for p in (p for p in params if p not in units and names[p][0] in saved):
        states[p] = {key: copied(fetch(None, value)) for key, value in saved[names[p][0]].items()}
    keys = keys_of(model, params, is_named)
    known = {name for in_one in names.values() for name in in_one}
    users = {key: copied(fetch(None, value)) for key, value in saved.items() if key not in known}
    result: dict[str, Any] = {"state": {keys[p]: states[p] for p in params if p in states} | users}
    if "param_groups" in state_dict:
        matched = match_groups(optim, state_dict["param_groups"], names)
        places = ([keys[p] for p in group["params"]] for group in optim.param_groups)
        result["param_groups"] = [g | {"params": inside} for g, inside in zip(matched, places, strict=True)]
    return result


def check_saved(state_dict: Mapping[str, Any]) -> None:
    if "state" not in state_dict:
        raise ValueError('`optim_state_dict` must have the keys "state"to be a valid optimizer state dict')
    if state_dict["state"] and all(isinstance(key, int) for key in state_dict["state"]):
        raise ValueError(
            "`optim_state_dict` has numbers for keys, as an optimizer without FSDP has: give it names first, by "
            "FullyShardedDataParallel.rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, model, optim=optim)"
        )
