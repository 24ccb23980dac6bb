"""Fully sharded data parallelism: units that know how, schedules that decide when."""

from minifsdp.fsdp.api import FullyShardedDataParallel, ShardingStrategy
from minifsdp.fsdp.overlap import OverlapSchedule
from minifsdp.fsdp.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.sync import SyncSchedule
from minifsdp.fsdp.wrap import ModuleWrapPolicy

__all__ = [
    "BackwardPrefetch",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OverlapSchedule",
    "PrefetchSchedule",
    "RateLimitedSchedule",
    "ShardingStrategy",
    "SyncSchedule",
]
