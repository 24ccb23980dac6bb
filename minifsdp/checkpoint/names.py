"""The names in a checkpoint: those of the model without wrappers, even if a wrapper's state dict has others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from minifsdp.checkpoint.optim_names import OptimizerIndex, find_units, parameter_names
from minifsdp.ddp import DistributedDataParallel
from minifsdp.wrapper_names import clean_name

StateDict = dict[str, Any]


def own_prefix(module: nn.Module) -> str:
    """The prefix that a wrapper adds to its state dict's keys. (FSDP and activation checkpoints add nothing.)"""
    if isinstance(module, DistributedDataParallel | nn.parallel.DistributedDataParallel):
        return "module."
    return "_orig_mod." if type(module).__name__ == "OptimizedModule" else ""  # not to import the compiler


class Names:
    """Translates between a model's own state dict, "inside", and a checkpoint, "outside".

    Attributes:
        of_parameters: what an optimizer may have, and the names outside of what is in it.
        known: all these names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefixes = [(path + own, path) for path, module in paths(model) if (own := own_prefix(module))]
        of_parameters = parameter_names(model, find_units(model))
        self.of_parameters = {p: [self.outside(name) for name in names] for p, names in of_parameters.items()}
        self.known = {name for of_p in self.of_parameters.values() for name in of_p}

    def outside(self, key: str) -> str:
        for long, short in reversed(self.prefixes):
            if key.startswith(long):
                key = short + key.removeprefix(long)
        return key

    def inside(self, key: str) -> str:
        for long, short in self.prefixes:
            if key.startswith(short):
                key = long + key.removeprefix(short)
        return key

    def in_order(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """The optimizers in the order of their first parameters in the model: the same on all ranks."""
        order = {p: index for index, p in enumerate(self.of_parameters)}
        firsts = {
            o: min((order.get(p, len(order)) for g in o.param_groups for p in g["params"]), default=0)
            for o in optimizers
        }
        return sorted(firsts, key=firsts.__getitem__)

    def of_submodules(self, submodules: set[nn.Module], state: StateDict, keep_prefixes: bool) -> StateDict:
        """The part of `state` in these submodules, under their own names or the model's."""
        result: StateDict = {}
        for prefix in (self.outside(prefix) for prefix, module in paths(self.model) if module in submodules):
            for name in (name for name in state if name.startswith(prefix)):
                result[name if keep_prefixes else name.removeprefix(prefix)] = state[name]
        return result

    def of_modules(self, state: dict[Any, Any]) -> StateDict:
        """A state whose keys are modules, for values by the names inside these, under the model's names."""
        if not state or not all(isinstance(key, nn.Module) for key in state):
            return state
        warnings.warn(
            "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]`` is deprecated and will be removed in "
            "2.5. If you need this feature, please preprocess the model_state_dict to achieve the same functionality.",
            FutureWarning,
            stacklevel=3,
        )
        prefixes = {module: self.outside(prefix) for prefix, module in paths(self.model)}
        return {prefixes[module] + name: value for module, of_one in state.items() for name, value in of_one.items()}

    def parsed(self, path: str) -> tuple[str, str, list[str]] | None:
        """`state.<name>.<key>` as the first part, the parameter's name and the keys; None if the model has not it."""
        kind, _, rest = path.partition(".")
        parts = rest.split(".")
        # One name may begin another: the longest is meant.
        cut = max((i for i in range(1, len(parts)) if ".".join(parts[:i]) in self.known), default=0)
        return (kind, ".".join(parts[:cut]), parts[cut:]) if cut else None

    def of_optimizer(self, optim: Optimizer, state_dict: StateDict, strict: bool) -> StateDict:
        """One optimizer's part of the state of several, with the names inside.

        Raises:
            RuntimeError: `strict`, and a trained parameter has no state where others have.
        """
        params = OptimizerIndex(self.model, optim).params
        state, groups = state_dict["state"], state_dict["param_groups"]
        mine = {name for p in params for name in self.of_parameters[p]}
        for p in params if strict and state else ():
            for name in self.of_parameters[p]:
                if p.requires_grad and name not in state:
                    raise RuntimeError(
                        f"Missing optimizer state for parameter '{name}' in checkpoint. The parameter requires "
                        "gradients but has no saved optimizer state. To load anyway, use "
                        "StateDictOptions(strict=False)."
                    )
        return {
            "state": {self.inside(name): state[name] for name in state if name in mine},
            "param_groups": [
                group | {"params": [self.inside(name) for name in group["params"] if name in mine]} for group in groups
            ],
        }


def paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each module with the prefix of its state dict's keys in the model's."""
    return [(clean_name(f"{path}." if path else ""), module) for path, module in model.named_modules()]


def rename_groups(groups: list[StateDict], rename: Callable[[str], str]) -> list[StateDict]:
    keys = ("params", "param_names")
    return [group | {key: [rename(name) for name in group[key]] for key in keys if key in group} for group in groups]


# One level deep


def flattened(state_dict: StateDict) -> StateDict:
    """`state.<name>.<key>` and `param_groups.<name>.<setting>`, so that parameters can be regrouped.

    Raises:
        NotImplementedError: a state is neither tensor nor number.
    """
    result: StateDict = {}

    def put(prefix: str, state: StateDict) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                put(f"{prefix}.{key}", value)
            elif isinstance(value, torch.Tensor | int | float):
                result[f"{prefix}.{key}"] = value
            else:
                raise NotImplementedError(
                    "Flattening optimizer state_dict only supports tensor, int, float, dict states now. "
                    f"Type is {type(value)}: {prefix}.{key}"
                )

    for name, state in state_dict["state"].items():
        put(f"state.{name}", state)
    for group in state_dict["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name in group["params"]:
            result |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return result


def unflattened(flat: StateDict, optimizers: Iterable[Optimizer], names: Names) -> StateDict:
    """The reverse of `flattened`, in the optimizers' groups.

    Raises:
        RuntimeError: parameters of one group have other settings.
    """
    entries: dict[str, dict[str, StateDict]] = {"state": {}, "param_groups": {}}
    for path, value in flat.items():
        if parsed := names.parsed(path):
            kind, name, (*outer, last) = parsed
            inner = entries[kind].setdefault(name, {})
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = value
    groups = []
    for group in (group for optim in optimizers for group in optim.param_groups):
        inside = [name for p in group["params"] for name in names.of_parameters[p]]
        saved = {name: entries["param_groups"][name] for name in inside if name in entries["param_groups"]}
        for name, settings in saved.items():
            if settings != saved[next(iter(saved))]:
                raise RuntimeError(
                    "All the parameters in the same parameter group should have the same saved param_group value. But "
                    f"{next(iter(saved))} has {saved[next(iter(saved))]} while {name} has {settings}."
                )
        groups.append(next(iter(saved.values()), group) | {"params": list(saved)})
    return {"state": entries["state"], "param_groups": groups}
