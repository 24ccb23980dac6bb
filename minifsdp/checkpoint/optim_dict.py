"""An optimizer's state dict, keyed by the original parameters' names instead of the shards' numbers, and back.

    {"state": {0: {...}}, "param_groups": [{"lr": ..., "params": [0]}]}                     optimizer.state_dict()
    {"state": {"a.weight": {...}, "a.bias": {...}}, "param_groups": [{..., "params": ["a.weight", "a.bias"]}]}

Except for the names, the second form is that of a single process (torch/distributed/fsdp/_optim_utils.py).
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm
from minifsdp.checkpoint.forms import FullOptimStateDictConfig, OptimStateDictConfig
from minifsdp.checkpoint.from_rank_0 import receive
from minifsdp.checkpoint.optim_names import OptimizerIndex, match_groups, settings_of
from minifsdp.checkpoint.optim_schema import UnitNames
from minifsdp.checkpoint.optim_units import gather_named_states, scatter_named_states
from minifsdp.checkpoint.sharded_values import copied, full_value, is_sharded, shard_value, whole_of
from minifsdp.checkpoint.units import wrappers_in
from minifsdp.comm import Group
from minifsdp.device import compute_device

StateDict = dict[str, Any]

# Saving


def to_names(
    model: nn.Module, optim: Optimizer, state_dict: StateDict, config: OptimStateDictConfig, group: Group | None = None
) -> StateDict:
    """`state_dict` of an optimizer over shards, with states by name; collective.

    Args:
        config: a FullOptimStateDictConfig: whole states, with its `rank0_only` an empty dict on the other ranks of
            `group`; otherwise each is sharded by itself.
        group: default: the ranks that the model is sharded over; all ranks, if it is replicated too.
    """
    known = OptimizerIndex(model, optim, is_named=isinstance(next(iter(state_dict["state"]), None), str))
    saved, to_cpu = state_dict["state"], config.offload_to_cpu
    states = {p: saved[known.keys[p]] for p in known.params if known.keys[p] in saved}

    def keep(one: UnitNames, whole: Tensor) -> Any:
        if isinstance(config, FullOptimStateDictConfig) or one.unit.contents.ranks == 1:
            return copied(whole, to_cpu)
        return shard_value(whole, one.unit.group, one.device_mesh, to_cpu)

    kept = not getattr(config, "rank0_only", False) or group_of(model, group).rank() == 0
    gathered = gather_named_states(known.managed, states, keep if kept else None)
    is_full = isinstance(config, FullOptimStateDictConfig)
    for p in (p for p in known.unmanaged if p in states):
        state = {key: states[p][key] for key in sorted(states[p], key=str)}  # the same order of gathering on all ranks
        values = {key: copied(whole_of(value) if is_full else value, to_cpu) for key, value in state.items()}
        if kept:
            gathered[known.names[p][0]] = {key: values[key] for key in states[p]}
    if not kept:
        return {}
    # In the model's order, so that ranks whose optimizers have other orders can exchange the values one by one.
    ordered = {name: gathered[name] for in_one in known.names.values() for name in in_one if name in gathered}
    for key in set(saved) - {known.keys[p] for p in known.params}:
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the returned "
            "state_dict. In most cases, this is a user-defined state that is not associated with any particular "
            "parameter.",
            stacklevel=3,
        )
        ordered[key] = saved[key]
    result: StateDict = {"state": ordered}
    if "param_groups" in state_dict:
        result["param_groups"] = []
        for described, ours in zip(state_dict["param_groups"], optim.param_groups, strict=True):
            keys = ("params", "param_names") if "param_names" in described else ("params",)  # of `named_parameters()`
            inside = {key: known.names_in(ours) for key in keys}
            result["param_groups"].append(settings_of(described) | inside)
    return result


def group_of(model: nn.Module, group: Group | None) -> Group:
    """`group`, or the ranks that have the model between them."""
    first = next(iter(wrappers_in(model)), None)
    if first is None or first.sharding_strategy.is_hybrid:
        return comm.world(group)
    return group or first.process_group


# Loading


def from_names(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: StateDict,
    is_named: bool = False,
    source: Group | None = None,
) -> StateDict:
    """A state dict for `optim`: this rank's part of `state_dict`, which has whole or sharded states by name.

    Args:
        optim: None: one of `model.parameters()`, with the groups of `state_dict`.
        is_named: the optimizer's own state dict has names for keys.
        source: `state_dict` comes from `outline_from_rank_0`, and rank 0 sends each state when its turn comes.
    """
    known = OptimizerIndex(model, optim, is_named)
    check_saved(state_dict)
    saved = state_dict["state"]

    def fetch(one: UnitNames | None, value: Any) -> Any:
        if one is not None and is_sharded(value):
            return full_value(value, one.unit.group, one.unit.device)
        if source is None:
            return value
        return receive(value, source, one.unit.device if one else compute_device(None, known.params, source))

    mine = [one for one in known.managed if not set(known.params).isdisjoint(one.unit.shards)]
    states = scatter_named_states(mine, saved, fetch)
    of_units = {name for one in known.managed for name in one.names}
    of_model = {name: p for p, names in known.names.items() for name in names}
    users: StateDict = {}
    for key, value in saved.items():  # rank 0 sends in the order of what it has, whatever the ranks' optimizers hold
        if key in of_units:
            continue
        if key in of_model:
            states[of_model[key]] = {inner: copied(fetch(None, each)) for inner, each in value.items()}
        else:
            users[key] = copied(fetch(None, value))
    result: StateDict = {"state": {known.keys[p]: states[p] for p in known.params if p in states} | users}
    if "param_groups" in state_dict:
        result["param_groups"] = match_groups(optim, state_dict["param_groups"], known)
    return result


def check_saved(state_dict: StateDict) -> None:
    if "state" not in state_dict:
        raise ValueError('`optim_state_dict` must have the keys "state"to be a valid optimizer state dict')
    if state_dict["state"] and all(isinstance(key, int) for key in state_dict["state"]):
        raise ValueError(
            "`optim_state_dict` has numbers for keys, as an optimizer without FSDP has: give it names first, by "
            "FullyShardedDataParallel.rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, model, optim=optim)"
        )
