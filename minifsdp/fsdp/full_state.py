"""The whole model under its original names: `summon_full_params`, full `state_dict` and `load_state_dict`.

All of it is collective: every rank has to call it, and each gets everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from minifsdp.fsdp.unit import UNSHARDED, Unit

WRAPPED = "_fsdp_wrapped_module"
FLAT_PARAM = "_flat_param"


@contextmanager
def exposed(module: nn.Module, unit: Unit, writeback: bool) -> Iterator[None]:
    """Have a unit whole, and its leaves among the parameters of their modules in place of the flat parameter.

    Args:
        module: the wrapped module, which holds the flat parameter.
        unit: its unit.
        writeback: store in the shards what is written to the leaves inside the `with`.
    """
    if torch._C._current_graph_task_id() != -1:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    whole = unit.state is UNSHARDED
    unit.start_gather()
    unit.wait_gather()
    flat = module._parameters.pop(FLAT_PARAM)
    for users, leaf in zip(unit.places, unit.leaves, strict=True):
        for place in users:
            place.module._parameters[place.attribute] = leaf
    try:
        yield
    finally:
        for place in (place for users in unit.places for place in users):
            del place.module._parameters[place.attribute]
        module._parameters[FLAT_PARAM] = flat
        if writeback:
            unit.store()
        if not whole:
            unit.free()


def state_dict(module: nn.Module, unit: Unit | None, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """The wrapped module's full state dict, without a trace of the wrapping; its tensors are copies."""
    if unit is None:
        return module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    with exposed(module, unit, writeback=False):
        state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for place in (place for users in unit.places for place in users):
            state[prefix + place.name] = state[prefix + place.name].clone()  # the unit's memory goes with the `with`
    return state


def register_load_hooks(wrapper: nn.Module, module: nn.Module, unit: Unit | None) -> None:
    """Let `load_state_dict` find full parameters under the wrapper, and keep what it has loaded."""
    stack = ExitStack()

    def before(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)
        if unit is not None:
            stack.enter_context(exposed(module, unit, writeback=True))

    def after(_: nn.Module, incompatible: Any) -> None:
        stack.close()
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_name(key) for key in keys]

    wrapper._register_load_state_dict_pre_hook(before)
    wrapper.register_load_state_dict_post_hook(after)


def clean_name(name: str) -> str:
    """A qualified name without the wrappers that it passes through."""
    return name.replace(f"{WRAPPED}.", "")
