"""minifsdp: DDP, ZeRO and FSDP built one small step at a time, on real process groups, with every byte measured.

The public names are imported on first use, so that `minifsdp.cost` needs no torch.
"""

from typing import TYPE_CHECKING

from minifsdp.moved import find_moved
from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, OverlappedDDP
    from minifsdp.flat_param import FlatParameter
    from minifsdp.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        MixedPrecision,
        OverlapSchedule,
        PrefetchSchedule,
        RateLimitedSchedule,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
        SyncSchedule,
        register_fsdp_forward_method,
    )
    from minifsdp.fsdp.wrap import (
        CustomPolicy,
        ModuleWrapPolicy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from minifsdp.grad_scaler import ShardedGradScaler
    from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

__all__ = [
    "BackwardPrefetch",
    "BucketedDDP",
    "CPUOffload",
    "CustomPolicy",
    "DistributedDataParallel",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NaiveDDP",
    "OverlapSchedule",
    "OverlappedDDP",
    "PrefetchSchedule",
    "RateLimitedSchedule",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictType",
    "SyncSchedule",
    "Zero1Optimizer",
    "Zero2Optimizer",
    "register_fsdp_forward_method",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

__getattr__ = on_first_use(__name__, __all__, ".fsdp", ".fsdp.wrap", ".ddp", ".zero", ".flat_param", ".grad_scaler")

find_moved()
