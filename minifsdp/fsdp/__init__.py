"""Fully sharded data parallelism: units gather, free and reduce; schedules decide when."""

# `A as A` is how a package says that a name is for its users.
from minifsdp.fsdp.schedules.overlap import OverlapSchedule as OverlapSchedule
from minifsdp.fsdp.schedules.prefetch import BackwardPrefetch as BackwardPrefetch
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule as PrefetchSchedule
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule as RateLimitedSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule as SyncSchedule
from minifsdp.fsdp.torch_api.api import FullyShardedDataParallel as FullyShardedDataParallel
from minifsdp.fsdp.torch_api.forward_method import register_fsdp_forward_method as register_fsdp_forward_method
from minifsdp.fsdp.torch_api.options import CPUOffload as CPUOffload
from minifsdp.fsdp.torch_api.options import FullOptimStateDictConfig as FullOptimStateDictConfig
from minifsdp.fsdp.torch_api.options import FullStateDictConfig as FullStateDictConfig
from minifsdp.fsdp.torch_api.options import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from minifsdp.fsdp.torch_api.options import LocalStateDictConfig as LocalStateDictConfig
from minifsdp.fsdp.torch_api.options import MixedPrecision as MixedPrecision
from minifsdp.fsdp.torch_api.options import OptimStateDictConfig as OptimStateDictConfig
from minifsdp.fsdp.torch_api.options import OptimStateKeyType as OptimStateKeyType
from minifsdp.fsdp.torch_api.options import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from minifsdp.fsdp.torch_api.options import ShardedStateDictConfig as ShardedStateDictConfig
from minifsdp.fsdp.torch_api.options import ShardingStrategy as ShardingStrategy
from minifsdp.fsdp.torch_api.options import StateDictConfig as StateDictConfig
from minifsdp.fsdp.torch_api.options import StateDictSettings as StateDictSettings
from minifsdp.fsdp.torch_api.options import StateDictType as StateDictType
from minifsdp.fsdp.torch_api.policies import ModuleWrapPolicy as ModuleWrapPolicy
