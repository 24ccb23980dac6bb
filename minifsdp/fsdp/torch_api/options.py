"""Options of FullyShardedDataParallel, under torch's names (torch/distributed/fsdp/api.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from minifsdp.private import AnyBatchNorm


class ShardingStrategy(Enum):
    """The tensors that are sharded between uses.

    * FULL_SHARD: everything (ZeRO-3).
    * SHARD_GRAD_OP: everything, but parameters not from forward to backward (ZeRO-2).
    * NO_SHARD: nothing (DDP).
    * HYBRID_SHARD, _HYBRID_SHARD_ZERO2: the first two inside a group of ranks, replicated across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass
class MixedPrecision:
    """The dtype of each stage of a step; None leaves the parameters' own. The shards keep theirs.

    Attributes:
        param_dtype: of the gathered parameters, hence of computation.
        reduce_dtype: of gradients on the wire; default: `param_dtype`.
        buffer_dtype: of buffers such as running means.
        keep_low_precision_grads: leave the shards' gradients in `reduce_dtype`.
        cast_forward_inputs: cast the inputs of every unit's forward to `param_dtype`.
        cast_root_forward_inputs: cast those of the root's.
        _module_classes_to_ignore: modules that an `auto_wrap_policy` wraps alone, in their own precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (AnyBatchNorm,)

    @property
    def computes_otherwise(self) -> bool:
        """True if units compute or reduce in another dtype than their shards'."""
        return self.param_dtype is not None or self.reduce_dtype is not None


@dataclass
class CPUOffload:
    """`offload_params`: shards, their gradients and so the optimizer's state live in host memory."""

    offload_params: bool = False


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


Kind = TypeVar("Kind")


def ours(kind: type[Kind], value: Any, argument: str) -> Kind:
    """`value` as a `kind`: one of ours, or torch's of the same name, so that either import will do.

    Raises:
        ValueError: it is neither; names the argument.
    """
    if isinstance(value, kind):
        return value
    if type(value).__name__ == kind.__name__:
        if issubclass(kind, Enum):
            return kind[value.name]
        return kind(**{f.name: getattr(value, f.name) for f in fields(kind)})  # type: ignore[arg-type]
    raise ValueError(f"{argument}={value!r}: give a {kind.__name__}")
