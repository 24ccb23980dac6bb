"""Which configuration belongs to which type of state dict."""

from __future__ import annotations

from typing import Any

from minifsdp.fsdp.options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
    ours,
)

CONFIGS: dict[StateDictType, tuple[type[Any], type[Any]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def make_settings(state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """The settings of a type, with its default configurations where none are given; torch's own will do.

    Raises:
        ValueError: no such type.
        RuntimeError: with torch's text, a configuration is another type's.
    """
    kind = ours(StateDictType, state_dict_type, "state_dict_type")
    chosen = []
    for expected, given, argument in zip(
        CONFIGS[kind], (config, optim_config), ("state_dict_config", "optim_state_dict_config"), strict=True
    ):
        value = expected() if given is None else given
        if type(value).__name__ != expected.__name__:
            raise RuntimeError(
                f"Expected {argument} of type {expected} but got {type(value)}: {kind.name} takes a {expected.__name__}"
            )
        chosen.append(ours(expected, value, argument))
    return StateDictSettings(kind, *chosen)
