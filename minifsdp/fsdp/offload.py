"""CPU offload: shards, gradients and so the optimizer live in host memory; the device sees whole units only.

    host    shard ............................ shard.grad -> optimizer
              | to the device                      ^ to the host
    device  full -> compute -> gradient -> mean ----

Copies are queued on the device, and the host runs on: it waits only before it reads what a copy writes, or writes what
a copy reads. On CPU both memories are one; the copies are made all the same, so that what is on the device can be
counted. (torch's `CPUOffload` overwrites the gradient on the host, so that accumulating outside `no_sync` goes wrong
there.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifsdp import device


class HostCopies:
    """The copies of one unit between host and device that are under way.

    Args:
        on: the device.
        pin: gradients arrive in pinned memory.
    """

    def __init__(self, on: torch.device, pin: bool = True) -> None:
        self.device, self.pin = on, pin
        self._sent: Any = None
        self._arriving: list[tuple[Tensor, Any]] = []

    def note_sent(self) -> None:
        """A copy of the shard to the device has been queued."""
        self._sent = device.current_stream(self.device).record_event()

    def wait_sent(self) -> None:
        """After this the host may write to the shard."""
        if self._sent is not None:
            self._sent.synchronize()  # after a backward the gradients' arrival says it
            self._sent = None

    def send(self, mean: Tensor) -> None:
        """Start to copy a gradient to the host; its memory on the device is given away."""
        on_host = device.copy_to_host(mean, self.pin)
        self._arriving.append((on_host, device.current_stream(self.device).record_event()))
        device.free(mean)

    def receive(self, add: Callable[[Tensor], None]) -> None:
        """Call `add` with each gradient that is on its way, once it is there: the host waits."""
        for gradient, arrival in self._arriving:
            arrival.synchronize()
            add(gradient)
        self._arriving.clear()
