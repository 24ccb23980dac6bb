"""Fully sharded data parallelism: units that know how, schedules that decide when."""

# `A as A` is how a package says that a name is for its users.
from minifsdp.fsdp.api import FullyShardedDataParallel as FullyShardedDataParallel
from minifsdp.fsdp.forward_method import register_fsdp_forward_method as register_fsdp_forward_method
from minifsdp.fsdp.options import CPUOffload as CPUOffload
from minifsdp.fsdp.options import FullOptimStateDictConfig as FullOptimStateDictConfig
from minifsdp.fsdp.options import FullStateDictConfig as FullStateDictConfig
from minifsdp.fsdp.options import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from minifsdp.fsdp.options import LocalStateDictConfig as LocalStateDictConfig
from minifsdp.fsdp.options import MixedPrecision as MixedPrecision
from minifsdp.fsdp.options import OptimStateDictConfig as OptimStateDictConfig
from minifsdp.fsdp.options import OptimStateKeyType as OptimStateKeyType
from minifsdp.fsdp.options import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from minifsdp.fsdp.options import ShardedStateDictConfig as ShardedStateDictConfig
from minifsdp.fsdp.options import ShardingStrategy as ShardingStrategy
from minifsdp.fsdp.options import StateDictConfig as StateDictConfig
from minifsdp.fsdp.options import StateDictSettings as StateDictSettings
from minifsdp.fsdp.options import StateDictType as StateDictType
from minifsdp.fsdp.overlap import OverlapSchedule as OverlapSchedule
from minifsdp.fsdp.prefetch import BackwardPrefetch as BackwardPrefetch
from minifsdp.fsdp.prefetch import PrefetchSchedule as PrefetchSchedule
from minifsdp.fsdp.rate_limit import RateLimitedSchedule as RateLimitedSchedule
from minifsdp.fsdp.sync import SyncSchedule as SyncSchedule
from minifsdp.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
