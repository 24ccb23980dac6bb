"""Fully sharded data parallelism: units gather, free and reduce; schedules decide when.

torch's names are imported on first use, so that the schedules do without them.
"""

from typing import TYPE_CHECKING

from minifsdp.fsdp.schedules.overlap import OverlapSchedule
from minifsdp.fsdp.schedules.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.checkpoint.forms import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from minifsdp.fsdp.torch_api.api import FullyShardedDataParallel
    from minifsdp.fsdp.torch_api.forward_method import register_fsdp_forward_method
    from minifsdp.fsdp.torch_api.options import CPUOffload, MixedPrecision, ShardingStrategy
    from minifsdp.fsdp.torch_api.policies import ModuleWrapPolicy

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

__getattr__ = on_first_use(
    __name__,
    __all__,
    *("minifsdp.checkpoint.forms", ".torch_api.options", ".torch_api.policies"),
    *(".torch_api.forward_method", ".torch_api.api"),
)
