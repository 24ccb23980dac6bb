"""Whose state is whose: an optimizer's parameters, their numbers and their names, in state and parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from minifsdp.fsdp.options import OptimStateKeyType, ours
from minifsdp.fsdp.state.methods import StateMethods
from minifsdp.fsdp.state.names import clean_name
from minifsdp.fsdp.state.optim_kinds import Managed
from minifsdp.fsdp.wrap import TAKEN_AS

ParamNames = dict[nn.Parameter, list[str]]
"""What the optimizer may see, and the original parameters in it: one, or those of a flat parameter."""


def find_managed(model: nn.Module) -> list[Managed]:
    """The units in `model` with their parameters' names, in the order of its modules."""
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, StateMethods) and module._unit is not None:
            inside = f"{prefix}." if prefix else ""
            names = [clean_name(inside + name) for name in module._unit.flat.names]
            found.append(Managed(module._unit, names, getattr(module, "_device_mesh", None)))
    return found


def parameter_names(model: nn.Module, managed: Iterable[Managed]) -> ParamNames:
    """All parameters of `model` that an optimizer may have: shards, and what no unit manages."""
    names = {p: names for one in managed for p, names in one.shards.items()}
    return names | {p: [clean_name(name)] for name, p in model.named_parameters() if p not in names}


def parameters_of(optim: Optimizer) -> list[nn.Parameter]:
    """In the order in which a state dict numbers them.

    Raises:
        ValueError: the optimizer is one whose steps need whole gradients.
    """
    if isinstance(optim, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS multiplies whole gradients with each other; on a shard it sees a part of them. Its state cannot be "
            "saved or loaded by name: take an optimizer that works on each element by itself."
        )
    return [p for group in optim.param_groups for p in group["params"]]


def check_known(params: Iterable[nn.Parameter], names: ParamNames) -> None:
    for p in params:
        if p not in names:
            name, _ = getattr(p, TAKEN_AS, ("of another model", None))
            raise ValueError(
                f"The optimizer has a parameter {tuple(p.shape)}, {name}, that the model has not: build the optimizer "
                "from the parameters of the wrapped model, after wrapping"
            )


def keys_of(model: nn.Module, params: list[nn.Parameter], is_named: bool) -> dict[nn.Parameter, Hashable]:
    """How the optimizer's own state dict calls its parameters: by number, or, if `is_named`, as the model does."""
    return {p: name for name, p in model.named_parameters()} if is_named else {p: i for i, p in enumerate(params)}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says, without whom it says it of."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}


def match_groups(optim: Optimizer, saved: list[dict[str, Any]], names: ParamNames) -> list[dict[str, Any]]:
    """For each of the optimizer's groups the settings of the saved group that has the same parameters.

    Raises:
        KeyError: a saved group has a parameter that the model has not.
        ValueError: the parameters of one group here were in groups that differ; or in none.
    """
    home = {name: settings_of(group) for group in saved for name in group["params"]}
    for name in home.keys() - {name for in_one in names.values() for name in in_one}:
        raise KeyError(f"{name}: the saved optimizer has this parameter, the model has not")
    matched = []
    for index, group in enumerate(optim.param_groups):
        inside = [name for p in group["params"] for name in names[p]]
        found = {name: home[name] for name in inside if name in home}
        settings = next(iter(found.values()), None)
        if settings is None:
            if inside or index >= len(saved):
                raise ValueError(f"No saved parameter group is like the optimizer's group {index}, of {inside}")
            settings = settings_of(saved[index])
        for name in (name for name in found if found[name] != settings):
            raise ValueError(
                f"{next(iter(found))} and {name} were in parameter groups that differ, here they are in one: pass "
                "use_orig_params=True, or wrap the modules of one group as units of their own"
            )
        matched.append(settings)
    return matched


def rekey(
    state_dict: dict[str, Any], key_type: OptimStateKeyType, model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """`state_dict` by name, or by number as `optim` numbers them; itself, if it is so already."""
    to_names = ours(OptimStateKeyType, key_type, "optim_state_key_type") is OptimStateKeyType.PARAM_NAME
    state, groups = state_dict["state"], state_dict["param_groups"]
    types = {type(key) for key in [*state, *(key for group in groups for key in group["params"])]}
    if len(types & {str, int}) > 1:
        raise ValueError(f"Invalid parameter keys: {state.keys()}")
    if types == {str if to_names else int}:
        return state_dict
    names = parameter_names(model, find_managed(model))
    for in_one in names.values():
        if len(in_one) != 1:
            raise RuntimeError(
                f"Each parameter should only map to one parameter name but got {len(in_one)}: {in_one}: pass the "
                "model that is not wrapped, or one wrapped with use_orig_params=True"
            )
    ids = {names[p][0]: i for i, p in enumerate(parameters_of(optim))}
    if to_names:
        new: dict[Any, Any] = {i: name for name, i in ids.items()}
        groups = [settings_of(group) | {"params": [new[i] for i in group["params"]]} for group in groups]
    else:  # which `load_state_dict` takes by place
        new = dict(ids)
        places = ([ids[names[p][0]] for p in group["params"]] for group in optim.param_groups)
        groups = [g | {"params": params} for g, params in zip(match_groups(optim, groups, names), places, strict=True)]
    return {"state": {new.get(key, key): value for key, value in state.items()}, "param_groups": groups}
