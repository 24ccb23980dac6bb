"""Applying an `auto_wrap_policy`: the checks before it, and the arguments of each unit that it creates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from minifsdp.flat_param import find_parameters
from minifsdp.fsdp.torch_api.construct import errors_end_in
from minifsdp.fsdp.torch_api.exempt import exempt_modules
from minifsdp.fsdp.torch_api.ignored import Ignored
from minifsdp.fsdp.torch_api.policies import Arguments, Chosen, ModuleWrapPolicy, _or_policy, lambda_auto_wrap_policy
from minifsdp.fsdp.torch_api.wrap import check_all_inside, wrap_children
from minifsdp.fsdp.torch_api.wrapped import instances_in


def wrap_submodules(
    module: nn.Module, policy: Any, ignored: Ignored, wrapper: Callable[..., nn.Module], arguments: Arguments
) -> None:
    """Replace the submodules that `policy` names by `wrapper(submodule, **arguments)`.

    Args:
        module: the outermost module, which the caller wraps.
        policy: a function (`WrapPolicy`), an object that names modules (`NamingPolicy`), or a set of module classes.
        ignored: not to be wrapped.
        wrapper: the class of the units.
        arguments: of each unit, unless the policy says otherwise.

    Raises:
        ValueError: some submodule is wrapped already, or shares a parameter with the rest of `module`.
    """
    names = {m: name for name, m in module.named_modules()}
    for inner in instances_in(module):
        raise ValueError(
            f"FSDP auto wrapping requires modules to not already have FSDP applied but found {names[inner]} in "
            f"{type(module).__name__}: leave all of it to the policy, or wrap all of it by hand"
        )
    if not hasattr(policy, "_run_policy") and (isinstance(policy, type) or not callable(policy)):
        policy = ModuleWrapPolicy(policy)
    precision = arguments["mixed_precision"]
    classes = () if precision is None else tuple(precision._module_classes_to_ignore)
    chosen = run_naming_policy(policy, module, ignored, arguments) if hasattr(policy, "_run_policy") else None
    exempt = exempt_modules(module, classes, ignored.modules)
    if chosen is not None:
        check_frozen(module, {*chosen, *exempt}, ignored, arguments["use_orig_params"])
        policy = partial(lambda_auto_wrap_policy, lambda_fn=chosen.__contains__)
    if exempt:
        policy = partial(_or_policy, policies=[policy, ModuleWrapPolicy(classes)])
    shared = [places for p, places in find_parameters(module).items() if len(places) > 1 and p not in ignored.params]

    def wrap(child: nn.Module) -> nn.Module:
        check_all_inside(shared, child)
        own = {"mixed_precision": None} if child in exempt else {}
        with errors_end_in(f"at {names[child]}"):
            return wrapper(child, **(chosen or {}).get(child, arguments) | own)

    wrap_children(module, policy, wrap, ignored)


def run_naming_policy(policy: Any, module: nn.Module, ignored: Ignored, arguments: Arguments) -> Chosen:
    """The modules inside `module` that the policy names, each with the arguments of its unit."""
    chosen = policy._run_policy(module, set(ignored.modules), dict(arguments))
    chosen = {child: own for child, own in chosen.items() if child is not module}
    if not chosen:
        warnings.warn(
            f"the auto_wrap_policy {policy!r} names no module inside {type(module).__name__}: all of it is one unit, "
            "whole from its forward to the end of backward",
            stacklevel=4,
        )
    return chosen


def check_frozen(module: nn.Module, chosen: set[nn.Module], ignored: Ignored, use_orig_params: bool) -> None:
    """Before anything is wrapped: no unit should have both frozen parameters and others.

    Raises:
        ValueError: one would, and its flat parameter would be either frozen or not. With `use_orig_params` it works,
            but wastes memory for the gradients of what is frozen: a warning.
    """
    for name, unit in module.named_modules():
        if unit not in chosen:
            continue
        inner = ignored.modules | (chosen.intersection(unit.modules()) - {unit})
        found = find_parameters(unit, skip=inner).items()
        params = {p: f"{name}.{places[0].name}" for p, places in found if p not in ignored.params}
        trained, frozen = ([n for p, n in params.items() if p.requires_grad is wanted] for wanted in (True, False))
        if not (trained and frozen):
            continue
        numel, of_trained = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        text = f"{name} has both parameters with requires_grad=True and False."
        cure = (
            "If possible, wrap the frozen parameters with FSDP separately.\n"
            f"The following parameters have requires_grad=True:\n{trained}\n"
            f"The following parameters have requires_grad=False:\n{frozen}"
        )
        if not use_orig_params:
            raise ValueError(
                f"{text} FSDP does not support wrapping such modules when use_orig_params=False. {cure}\n"
                "Or pass use_orig_params=True."
            )
        warnings.warn(
            f"{text} We do not recommend wrapping such modules since the gradient memory usage will be higher than "
            f"expected ({numel} numel instead of {of_trained} numel before sharding via reduce-scatter). {cure}",
            stacklevel=4,
        )
