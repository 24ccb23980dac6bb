"""A unit's layout: shard and replicate groups, dtypes of computation and reduction, and memory.

    inside    across    gather        reduction                                      torch's word
    group     None      all-gather    reduce-scatter                                 FULL_SHARD, SHARD_GRAD_OP
    group     group     all-gather    reduce-scatter, then all-reduce of 1 / N       HYBRID_SHARD
    None      group     nothing       all-reduce                                     NO_SHARD

The strategies of the FSDP paper (arXiv 2304.11277, 3.2) are rows of this table. Hybrid sharding keeps gathers, the
larger and more urgent part, inside a group, where links are fast; only gradients leave it, and only 1/N of them per
rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from minifsdp.comm import Group


@dataclass(frozen=True)
class Plan:
    """The ranks, dtypes and memory of a unit.

    Attributes:
        inside: the ranks that hold one copy of the unit together; None: each rank holds all of it.
        across: the ranks that hold the same shard; None: each shard exists once. It is not None if `inside` is None.
        compute: dtype of the gathered parameters; None: the dtype of the shard.
        reduce: dtype of the gradients that are reduced; None: `compute`.
        keep_low: leave the shard's gradient in the dtype `reduce`.
        offload: keep shard and gradient in host memory, on any device.
        pin: pin this memory if the device is CUDA, so that copies run concurrently with the computation.
    """

    inside: Group | None
    across: Group | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep_low: bool = False
    offload: bool = False
    pin: bool = True

    @cached_property
    def group(self) -> Group:
        """The ranks that the unit's first collectives are among."""
        group = self.inside or self.across
        assert group is not None, "a plan needs ranks"
        return group

    @cached_property
    def is_hybrid(self) -> bool:
        """True if a mean inside is only a part of the mean: the replicas have the others."""
        return self.inside is not None and self.across is not None

    @cached_property
    def averaged_over(self) -> int:
        """Number of ranks whose gradients a mean is made of."""
        return math.prod(group.size() for group in (self.inside, self.across) if group is not None)
