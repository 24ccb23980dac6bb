"""The forms of a state dict, under the names that torch has for FSDP's (torch/distributed/fsdp/api.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from minifsdp.kinds import ours


class StateDictType(Enum):
    """The form of a state dict: whole parameters, a shard of each, or the flat shard as it lies."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """`offload_to_cpu`: the values are in host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """`rank0_only`: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig): ...


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """`_use_dtensor`: the values are DTensors (chosen where there is a device mesh), else ShardedTensors."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """`offload_to_cpu`: the states are in host memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """`rank0_only`: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """`_use_dtensor`: as in `ShardedStateDictConfig`."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The current settings of a model's `state_dict` and `optim_state_dict`."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


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
    arguments = {"state_dict_config": config, "optim_state_dict_config": optim_config}
    for expected, (argument, given) in zip(CONFIGS[kind], arguments.items(), strict=True):
        value = expected() if given is None else given
        if type(value).__name__ != expected.__name__:
            raise RuntimeError(
                f"Expected {argument} of type {expected} but got {type(value)}: {kind.name} takes a {expected.__name__}"
            )
        chosen.append(ours(expected, value, argument))
    return StateDictSettings(kind, *chosen)


class OptimStateKeyType(Enum):
    """The keys of parameters in an optimizer state dict: qualified names, or indices."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
