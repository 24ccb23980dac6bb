"""Fully sharded data parallelism: units that know how, schedules that decide when."""

from minifsdp.fsdp.api import FullyShardedDataParallel
from minifsdp.fsdp.forward_method import register_fsdp_forward_method
from minifsdp.fsdp.options import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from minifsdp.fsdp.overlap import OverlapSchedule
from minifsdp.fsdp.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.sync import SyncSchedule
from minifsdp.fsdp.wrap import ModuleWrapPolicy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OverlapSchedule",
    "PrefetchSchedule",
    "RateLimitedSchedule",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "SyncSchedule",
    "register_fsdp_forward_method",
]
