"""The whole model under its original names: `summon_full_params`, full `state_dict` and `load_state_dict`.

All of it is collective: every rank has to call it, and each gets everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.fsdp.flat_unit import FlatUnit

WRAPPED = "_fsdp_wrapped_module"
FLAT_PARAM = "_flat_param"


@contextmanager
def exposed(module: nn.Module, unit: FlatUnit, writeback: bool) -> Iterator[None]:
    """Have a unit's whole values among the parameters of their modules, in place of the flat parameter.

    Args:
        module: the wrapped module, which holds the flat parameter, unless the unit shows the original ones.
        unit: its unit.
        writeback: store in the shards what is written inside the `with`.
    """
    if torch._C._current_graph_task_id() != -1:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    if unit.is_exposed:
        yield
        return
    flat = module._parameters.pop(FLAT_PARAM, None)
    with unit.whole() as full:
        unit.expose(full)
        unit.is_exposed = True
        try:
            yield
        finally:
            unit.is_exposed = False
            unit.conceal()
            if flat is not None:
                module._parameters[FLAT_PARAM] = flat
            if writeback:
                unit.store(full)


def state_dict(
    module: nn.Module, unit: FlatUnit | None, destination: Any, prefix: str, keep_vars: bool
) -> dict[str, Any]:
    """The wrapped module's full state dict, without a trace of the wrapping; its parameters are copies."""
    if unit is None:
        return module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    with exposed(module, unit, writeback=False):
        state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        units_memory = {storage_of(getattr(module, attribute)) for (module, attribute, _), *_ in unit.places}
        for name, value in state.items():
            if isinstance(value, Tensor) and storage_of(value) in units_memory:
                state[name] = value.detach().clone()  # the unit's memory goes with the `with`
    return state


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def register_load_hooks(wrapper: nn.Module, module: nn.Module, unit: FlatUnit | None) -> None:
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
