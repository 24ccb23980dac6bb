"""CPU offload: shards, gradients and the optimizer's state are in host memory; the device sees only unsharded units.

    host    shard ............................ shard.grad -> optimizer
              | to the device                      ^ to the host
    device  full -> compute -> gradient -> mean ----

Copies are queued on the device, and the host continues. It waits only before it reads the target of a copy or writes to
the source of one. On CPU both memories are the same, but the copies are made nevertheless, so that bytes on the device
can be counted. (torch's `CPUOffload` overwrites the gradient on the host, so accumulation outside `no_sync` gives wrong
gradients there.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifsdp import device


class HostCopies:
    """The copies of one unit between host and device that are in progress.

    Args:
        on: the device.
        pin: gradients arrive in pinned memory.
    """

    def __init__(self, on: torch.device, pin: bool = True) -> None:
        self.device, self.pin = on, pin
        self._sent: Any = None
        self._arriving: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def note_sent(self) -> None:
        """A copy of the shard to the device has been queued."""
        self._sent = device.current_stream(self.device).record_event()

    def wait_sent(self) -> None:
        """After this the host may write to the shard."""
        if self._sent is not None:
            self._sent.synchronize()  # after a backward the gradients' arrival says it
            self._sent = None

    def send(self, mean: Tensor, add: Callable[[Tensor], None]) -> None:
        """Start to copy a gradient to the host, where `add` takes it; its memory on the device is given away."""
        on_host = device.copy_to_host(mean, self.pin)
        self._arriving.append((on_host, device.current_stream(self.device).record_event(), add))
        device.free(mean)

    def receive(self) -> None:
        """Add each gradient that is on its way, once it is there: the host waits."""
        for gradient, arrival, add in self._arriving:
            arrival.synchronize()
            add(gradient)
        self._arriving.clear()
