"""The whole model under its original names: `summon_full_params`, full `state_dict` and `load_state_dict`.

All of it is collective: every rank has to call it, and each gets everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
    if FLAT_PARAM not in module._parameters:  # inside another `exposed`
        yield
        return
    whole = unit.state is UNSHARDED
    _gather_anew(unit)  # what a forward has left whole may be older than the shards
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
        if whole:
            _gather_anew(unit)  # the shards as they are now
        else:
            unit.free()


def _gather_anew(unit: Unit) -> None:
    unit.free()
    unit.start_gather()
    unit.wait_gather()


def state_dict(module: nn.Module, unit: Unit | None, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """The wrapped module's full state dict, without a trace of the wrapping; its parameters are copies."""
    if unit is None:
        return module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    with exposed(module, unit, writeback=False):
        state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        units_memory = {leaf.untyped_storage().data_ptr() for leaf in unit.leaves}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in units_memory:
                state[name] = value.detach().clone()  # the unit's memory goes with the `with`
    return state


def register_load_hooks(wrapper: nn.Module, module: nn.Module, unit: Unit | None) -> None:
    """Let `load_state_dict` find full parameters under the wrapper, and keep what it has loaded."""
    stack = ExitStack()

    def before(state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *reports: list[str]) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True): an FSDP unit's parameters are views, they stay where they are"
            )
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)
        stack.callback(clean, reports)
        if unit is not None:
            stack.enter_context(exposed(module, unit, writeback=True))

    def clean(reports: tuple[list[str], ...]) -> None:
        for lines in reports:  # of missing keys, unexpected keys and errors
            lines[:] = [clean_name(line) for line in lines]

    def after(*_: Any) -> None:
        stack.close()

    wrapper._register_load_state_dict_pre_hook(before)
    wrapper.register_load_state_dict_post_hook(after)


def clean_name(name: str) -> str:
    """A qualified name without the wrappers that it passes through."""
    return name.replace(f"{WRAPPED}.", "")
