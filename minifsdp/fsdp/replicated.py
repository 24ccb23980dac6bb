"""NO_SHARD: a flat parameter that every rank holds whole. What is left of FSDP is DDP with a bucket per unit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Done, Handle
from minifsdp.fsdp.whole import WholeUnit


class ReplicatedUnit(WholeUnit):
    """A unit on the same schedules whose gather has no one to ask; its gradient is all-reduced in place.

    The shard is the whole, and the leaves are views of it, unless another concern (another dtype, another device)
    puts a copy in between.

    Args:
        flat: the flat parameter, cut into one shard.
        group: the process group of the replicas.
    """

    _is_resident = False  # there is no copy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "reshard_after_forward": False})

    def _make_full(self) -> tuple[Tensor, list[Tensor]]:
        self._is_resident = True
        return self.flat.shard.data, self.flat.unflatten(self.flat.shard.data)

    def mine(self, full: Tensor) -> Tensor:
        return full

    def _gather(self) -> Any:
        if self._is_resident:
            return Done()
        device.allocate(self.full)
        self._outgoing(self._target)
        return device.current_stream(self.device).record_event()  # the copy is waited for as a collective would be

    def _release(self) -> None:
        if not self._is_resident:
            super()._release()

    def _hide(self) -> None:
        if self._is_resident:
            self._show()
        else:
            super()._hide()

    def _reduce(self) -> Handle:
        self._mean = self._complete_gradient()
        return comm.all_reduce(self._mean, self.group, self.reduction)

    def _accumulate(self) -> None:
        self._receive(self._mean)
        del self._mean, self._reduced, self._reduced_views

    def _assemble(self) -> Tensor:
        return self.flat.shard.data
