"""`load_state_dict`, by hooks: it may be called on a module that has the wrappers somewhere inside."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from minifsdp.fsdp.options import StateDictType
from minifsdp.fsdp.state import local, sharded
from minifsdp.fsdp.state.names import WRAPPED, clean_name
from minifsdp.fsdp.state.summon import Summon, exposed

if TYPE_CHECKING:
    from minifsdp.fsdp.state.methods import StateMethods


def register_load_hooks(instance: StateMethods) -> ExitStack:
    """Let `load_state_dict` find what is loaded under the wrapper, and keep it.

    Returns:
        what is left to do when it has loaded, or has raised.
    """
    stack = ExitStack()

    def before(state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *reports: list[str]) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True): an FSDP unit's parameters are views, they stay where they are"
            )
        stack.callback(clean, reports)
        kind = instance.kind_of_state()
        if kind is StateDictType.LOCAL_STATE_DICT:
            local.load(instance, state, prefix)
        else:
            sharded.gather_values(instance, state, prefix, errors=reports[-1])
            stack.enter_context(exposed(instance, Summon(writeback=True)))
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)

    def clean(reports: tuple[list[str], ...]) -> None:
        for lines in reports:  # of missing keys, unexpected keys and errors
            lines[:] = [clean_name(line) for line in lines]

    def after(*_: Any) -> None:
        stack.close()

    instance._register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
    instance.register_load_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
    return stack
