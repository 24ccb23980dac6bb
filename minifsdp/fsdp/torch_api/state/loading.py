"""`load_state_dict`, implemented with hooks, because it may be called on a module that contains wrapped modules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from minifsdp.checkpoint.forms import StateDictType
from minifsdp.checkpoint.sharded_values import full_value, into_rows, is_sharded
from minifsdp.fsdp.torch_api.state.summon import Summon, exposed
from minifsdp.fsdp.torch_api.wrapped import Wrapped
from minifsdp.wrapper_names import FLAT_PARAM, WRAPPED, clean_name


def register_load_hooks(instance: Wrapped) -> ExitStack:
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
            load_local(instance, state, prefix)
        else:
            gather_values(instance, state, prefix, errors=reports[-1])
            stack.enter_context(exposed(instance, Summon(writeback=True)))
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)

    def clean(reports: tuple[list[str], ...]) -> None:
        for lines in reports:  # of missing keys, unexpected keys and errors
            lines[:] = [clean_name(line) for line in lines]

    instance._register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
    instance.register_load_state_dict_post_hook(lambda *_: stack.close())  # type: ignore[no-untyped-call]
    return stack


def gather_values(instance: Wrapped, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace the values of the unit's parameters by whole ones, to be loaded as a full state dict's.

    One all-gather per parameter. A value that is whole, as that of a full state dict, stays.
    """
    for name in (prefix + clean_name(place.name) for place in instance._places):
        if is_sharded(state.get(name)):
            try:
                state[name] = full_value(state[name], instance.process_group, instance.compute_device)
            except RuntimeError as error:
                errors.append(f"{name}: {error}")
                del state[name]


def load_local(instance: Wrapped, state: dict[str, Any], prefix: str) -> None:
    """Copy the flat shard in `state` to the unit's, and put in its place what `load_state_dict` looks for.

    Raises:
        AssertionError: with torch's texts, there is none, or it is not a ShardedTensor.
        RuntimeError: it is another model's, or cut for another number of ranks.
    """
    unit, name = instance._unit, prefix + FLAT_PARAM
    if unit is None:
        return
    of = type(instance.module).__name__
    if name not in state:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            f"there is no {name} for {of}. Is it a local state dict, of a model wrapped like this one?"
        )
    value, shard, (_, total) = state.pop(name), unit.contents.shard.data, unit.contents.without_padding()
    if hasattr(value, "metadata") and value.metadata().size[0] != total:
        raise RuntimeError(
            f"{name} has {value.metadata().size[0]} elements, the unit of {of} {total}: a local state dict "
            "loads into the same model, wrapped in the same way"
        )
    into_rows(shard, value, unit.group)
    if FLAT_PARAM in instance.module._parameters:
        state[name] = shard
    else:
        for users, p in zip(unit.view.places, unit.shards, strict=True):
            state.update({prefix + clean_name(place.name): p.data for place in users})
