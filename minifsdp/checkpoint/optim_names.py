"""An optimizer's parameters, their numbers and their names, in state and parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from minifsdp.checkpoint.forms import OptimStateKeyType
from minifsdp.checkpoint.optim_schema import UnitNames
from minifsdp.checkpoint.units import Wrapper, wrappers_in
from minifsdp.kinds import ours
from minifsdp.optimizer_checks import ORIGINAL_NAME
from minifsdp.optimizer_steps import parameters_of
from minifsdp.whole_tensors import NEEDS
from minifsdp.wrapper_names import clean_name

ParamNames = dict[nn.Parameter, list[str]]
"""What the optimizer may see, and the original parameters in it: one, or those of a flat parameter."""


def find_units(model: nn.Module) -> list[UnitNames]:
    """The units in `model` with their parameters' names, in the order of its modules."""
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, Wrapper) and module._unit is not None:
            inside = f"{prefix}." if prefix else ""
            names = [clean_name(inside + name) for name in module._unit.contents.names]
            found.append(UnitNames(module._unit, names, getattr(module, "_device_mesh", None)))
    return found


def parameter_names(model: nn.Module, managed: Iterable[UnitNames]) -> ParamNames:
    """All parameters of `model` that an optimizer may have: shards, and what no unit manages."""
    names = {p: names for one in managed for p, names in one.shards.items()}
    return names | {p: [clean_name(name)] for name, p in model.named_parameters() if p not in names}


def parameters_by_number(optim: Optimizer) -> list[nn.Parameter]:
    """In the order in which a state dict numbers them.

    Raises:
        ValueError: the optimizer is one whose steps need whole gradients.
    """
    check_by_element(optim)
    return parameters_of(optim)


def check_by_element(optim: Optimizer) -> None:
    """
    Raises:
        ValueError: the optimizer is one whose steps need whole gradients.
    """
    if isinstance(optim, torch.optim.LBFGS):
        raise ValueError(
            f"LBFGS {NEEDS[torch.optim.LBFGS]}, so it has one state for all parameters, which cannot be saved or "
            "loaded by name: take an optimizer that updates element by element."
        )


class OptimizerIndex:
    """An index of an optimizer's parameters; without an optimizer, of all that the model has.

    Attributes:
        params: they, in the order in which a state dict numbers them.
        managed: the model's units.
        names: of all that the model has, in its order, which is the same on all ranks. The optimizer's need not be.
        keys: how the optimizer's own state dict calls them: by number, or, if it `is_named`, as the model does.
        unmanaged: those that are in no unit, in the order of `names`.

    Raises:
        ValueError: the model has not one of them; or the optimizer's steps need whole gradients.
        AssertionError: they are whole at present, what the optimizer has of them is not.
    """

    def __init__(self, model: nn.Module, optim: Optimizer | None, is_named: bool = False) -> None:
        check_not_summoned(model)
        self.params = list(model.parameters()) if optim is None else parameters_by_number(optim)
        self.managed = find_units(model)
        self.names = parameter_names(model, self.managed)
        for p in self.params:
            if p not in self.names:
                name, _ = getattr(p, ORIGINAL_NAME, ("of another model", None))
                raise ValueError(
                    f"The optimizer has a parameter {tuple(p.shape)}, {name}, that the model has not: build the "
                    "optimizer from the parameters of the wrapped model, after wrapping"
                )
        of_model: dict[nn.Parameter, Hashable] = {p: name for name, p in model.named_parameters()}
        self.keys = of_model if is_named else {p: number for number, p in enumerate(self.params)}
        in_units = {p for one in self.managed for p in one.unit.shards}
        self.unmanaged = [p for p in self.names if p not in in_units and p in self.keys]

    def names_in(self, group: Mapping[str, Any]) -> list[str]:
        """The original parameters in one of the optimizer's groups."""
        return [name for p in group["params"] for name in self.names[p]]


def check_not_summoned(model: nn.Module) -> None:
    for wrapper in wrappers_in(model):
        unit = wrapper._unit
        is_summoned = wrapper._summoned is not None and wrapper._use_orig_params
        if is_summoned and unit is not None and unit.contents.ranks > 1:
            raise AssertionError(
                f"the parameters of {unit.title} are whole inside summon_full_params, the optimizer's states of them "
                "are sharded: call optim_state_dict and optim_state_dict_to_load outside"
            )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings, without its parameters."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}


def match_groups(optim: Optimizer | None, saved: list[dict[str, Any]], known: OptimizerIndex) -> list[dict[str, Any]]:
    """The optimizer's groups, each with the settings of the saved group that has the same parameters.

    A group without saved parameters keeps its own settings, if no unit manages one of its parameters. Without an
    optimizer the groups are the saved ones.

    Raises:
        KeyError: a saved group has a parameter that the model has not.
        ValueError: the parameters of one group here were in groups that differ; or in none.
    """
    home = {name: settings_of(group) for group in saved for name in group["params"]}
    for name in home.keys() - {name for in_one in known.names.values() for name in in_one}:
        raise KeyError(f"{name}: the saved optimizer has this parameter, the model has not")
    groups = [with_params(group, known) for group in saved] if optim is None else optim.param_groups
    matched = []
    for index, group in enumerate(groups):
        inside = known.names_in(group)
        found = {name: home[name] for name in inside if name in home}
        settings = next(iter(found.values())) if found else own_settings(group, index, saved, known)
        for name in (name for name in found if found[name] != settings):
            raise ValueError(
                f"{next(iter(found))} and {name} were in parameter groups that differ, here they are in one: pass "
                "use_orig_params=True, or wrap the modules of one group as units of their own"
            )
        matched.append(settings | {"params": [known.keys[p] for p in group["params"]]})
    return matched


def with_params(saved: Mapping[str, Any], known: OptimizerIndex) -> dict[str, Any]:
    """A saved group with the model's parameters instead of their names."""
    return {"params": [p for p in known.params if known.names[p][0] in saved["params"]]}


def own_settings(
    group: Mapping[str, Any], index: int, saved: list[dict[str, Any]], known: OptimizerIndex
) -> dict[str, Any]:
    """The settings of a group that has no saved parameter."""
    if not group["params"] and index < len(saved):
        return settings_of(saved[index])
    own = settings_of(group)
    is_complete = all(own.keys() >= settings_of(other).keys() for other in saved)
    if set(group["params"]) <= set(known.unmanaged) and is_complete:
        return own
    raise ValueError(
        f"No saved parameter group is like the optimizer's group {index}, of {known.names_in(group)}"
        + ("" if is_complete else ": pass optim=, whose groups have all settings")
    )


def rekey(
    state_dict: dict[str, Any], key_type: OptimStateKeyType, model: nn.Module, optim: Optimizer | None
) -> dict[str, Any]:
    """`state_dict` by name, or by number as `optim` numbers them, or the model; itself, if it is so already."""
    to_names = ours(OptimStateKeyType, key_type, "optim_state_key_type") is OptimStateKeyType.PARAM_NAME
    state, groups = state_dict["state"], state_dict["param_groups"]
    types = {type(key) for key in [*state, *(key for group in groups for key in group["params"])]}
    if len(types & {str, int}) > 1:
        raise ValueError(f"Invalid parameter keys: {state.keys()}")
    if types == {str if to_names else int}:
        return state_dict
    known = OptimizerIndex(model, optim)
    for in_one in known.names.values():
        if len(in_one) != 1:
            raise RuntimeError(
                f"Each parameter should only map to one parameter name but got {len(in_one)}: {in_one}: pass the "
                "model that is not wrapped, or one wrapped with use_orig_params=True"
            )
    new: dict[Any, Any] = {number: known.names[p][0] for p, number in known.keys.items()}
    if to_names:
        groups = [settings_of(group) | {"params": [new[number] for number in group["params"]]} for group in groups]
    else:
        new = {name: number for number, name in new.items()}
        groups = match_groups(optim, groups, known)
    return {"state": {new.get(key, key): value for key, value in state.items()}, "param_groups": groups}
