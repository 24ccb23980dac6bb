"""CPU offload: shards, gradients and so the optimizer live in host memory; the device sees whole units only.

    host    shard ............................ shard.grad -> optimizer
              | to the device                      ^ to the host
    device  full -> compute -> gradient -> mean ----

(torch's `CPUOffload` overwrites the gradient on the host, so that accumulating outside `no_sync` goes wrong there.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minifsdp import device
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.staged import StagedUnit


class OffloadedUnit(StagedUnit):
    """A unit whose shards are in host memory, pinned on CUDA, whatever device it computes on.

    On CPU both memories are one; the copies are made all the same, so that what is on the device can be counted.
    """

    moved = (
        "An FSDP-managed module with parameter CPU offloading enabled has parameters on {}. Make sure to not move the "
        "module from CPU when offloading parameters"
    )

    def __init__(self, flat: FlatParameter, *args: Any, **kwargs: Any) -> None:
        flat.shard = nn.Parameter(device.copy_to_host(flat.shard.data), flat.shard.requires_grad)
        device.synchronize(flat.full.device)  # the host may read the shard as soon as the unit is made
        self._arriving: list[tuple[Tensor, Any]] = []  # gradients on their way to the host, and when they are there
        self._sent: Any = None  # when the last gather has read the shard
        super().__init__(flat, *args, **kwargs)

    def _make_full(self) -> tuple[Tensor, list[Tensor]]:  # of NO_SHARD too, whose shard is not on the device
        return self.flat.full, self.flat.views

    def _outgoing(self, full: Tensor) -> Tensor:
        mine = super()._outgoing(full)
        self._sent = device.current_stream(self.device).record_event()
        return mine

    def release_shards(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # after a backward the gradients' arrival says it
            self._sent = None

    def _deliver(self, gradient: Tensor) -> None:
        self._arriving.append((device.copy_to_host(gradient), device.current_stream(self.device).record_event()))
        device.free(gradient)

    def settle(self) -> None:
        super().settle()
        for gradient, arrival in self._arriving:
            arrival.synchronize()  # the host is about to read it
            super()._deliver(gradient)
        self._arriving.clear()
