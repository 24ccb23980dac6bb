"""The base of FullyShardedDataParallel, for the parts of the package that must not import the class itself."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from minifsdp.checkpoint.forms import StateDictSettings, StateDictType
from minifsdp.checkpoint.units import Wrapper
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.wrapper_names import CHECKPOINTED


class Wrapped(Wrapper):
    """A wrapped module and its unit."""

    rank: int
    sharding_strategy: ShardingStrategy
    compute_device: torch.device
    _fsdp_wrapped_module: nn.Module
    _ignored: Any
    _unit: FlatUnit | None
    _engine: Engine | None
    _settings: StateDictSettings
    _buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype]
    _saves: bool  # its state dict is being made
    _loading: ExitStack

    @property
    def module(self) -> nn.Module:
        """The wrapped module; if that is an activation checkpoint around it, what is inside."""
        wrapped = self._fsdp_wrapped_module
        inside = wrapped._modules.get(CHECKPOINTED)
        return wrapped if inside is None else inside

    def kind_of_state(self) -> StateDictType:
        """The type chosen for this instance. Where nothing is sharded, there is nothing but the full state."""
        chosen = self._settings.state_dict_type
        if self.sharding_strategy is ShardingStrategy.NO_SHARD and chosen is not StateDictType.FULL_STATE_DICT:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=3
            )
            return StateDictType.FULL_STATE_DICT
        return chosen


def instances_in(module: nn.Module) -> list[Wrapped]:
    """All wrapped modules in `module`, itself included."""
    return [each for each in module.modules() if isinstance(each, Wrapped)]
