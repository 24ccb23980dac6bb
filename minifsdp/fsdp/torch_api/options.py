"""Options of FullyShardedDataParallel, under torch's names (torch/distributed/fsdp/api.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

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
