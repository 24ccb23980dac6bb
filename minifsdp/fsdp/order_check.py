"""Units that compare notes: does every rank issue the same collectives of the same units? (order.py)"""

from __future__ import annotations

from torch import Tensor

from minifsdp.comm import Done, Handle
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.hybrid import HybridUnit
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.order import announce


class CheckedUnit(FlatUnit):
    """A unit that announces each of its collectives before it issues it."""

    def gather_into(self, full: Tensor) -> Handle | Done:
        announce("all-gather", self.title, full, self.group)
        return super().gather_into(full)

    def _complete_gradient(self) -> Tensor:
        gradient = super()._complete_gradient()
        op = "all-reduce" if isinstance(self, ReplicatedUnit) else "reduce-scatter"
        announce(op, self.title, gradient, self.group)
        return gradient

    def _accumulate(self) -> None:
        if isinstance(self, HybridUnit):
            announce("all-reduce", self.title, self._mean, self.replicas)
        super()._accumulate()
