"""Units that compare notes: does every rank issue the same collectives of the same units? (order.py)"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minifsdp.comm import Done, Handle
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.hybrid import HybridUnit
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.order import announce, next_on


class CheckedUnit(FlatUnit):
    """A unit that announces each of its collectives before it issues it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whose = f"unit {next_on(self.group)} of the group"

    def gather_into(self, full: Tensor) -> Handle | Done:
        announce("all-gather", self.title, full, self.group, self._whose)
        return super().gather_into(full)

    def _complete_gradient(self) -> Tensor:
        gradient = super()._complete_gradient()
        op = "all-reduce" if isinstance(self, ReplicatedUnit) else "reduce-scatter"
        announce(op, self.title, gradient, self.group, self._whose)
        return gradient

    def _accumulate(self) -> None:
        if isinstance(self, HybridUnit):
            announce("all-reduce", self.title, self._mean, self.replicas, self._whose)
        super()._accumulate()
