"""Hybrid sharding: a model sharded inside a group of ranks and replicated across groups (FSDP paper 3.2.2).

Gathers, the larger and more urgent part, stay inside the group, where links are fast. Only gradients leave it, and
only 1/N of them per rank:

    gradient [P] --reduce-scatter inside--> mean [P / N] --all-reduce across--> mean over all ranks [P / N]
"""

from __future__ import annotations

from typing import Any

from minifsdp import comm
from minifsdp.comm import Group, Handle
from minifsdp.fsdp.flat_unit import FlatUnit


class HybridUnit(FlatUnit):
    """A unit whose shard exists on several ranks.

    The all-reduce starts when the reduce-scatter has ended and is waited for at the end of backward: it overlaps
    the next units' reduce-scatters. Gradients of earlier backwards are added to after it, not before.

    Args:
        replicas: the ranks that hold the same shard.
    """

    def __init__(self, *args: Any, replicas: Group, **kwargs: Any) -> None:
        self.replicas = replicas
        self._across: Handle | None = None
        super().__init__(*args, **kwargs)

    @property
    def averaged_over(self) -> int:
        return self.group.size() * self.replicas.size()

    def _accumulate(self) -> None:
        self._free_gradient()
        self._across = comm.all_reduce(self._mean, self.replicas, self.reduction)

    def settle(self) -> None:
        if self._across is not None:
            self._across.wait()
            self._across = None
            self._receive(self._mean)
            del self._mean
        super().settle()
