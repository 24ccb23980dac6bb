"""Report losses without waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.instruments.launch import report


class Dial:
    """Report the losses of steps that the device has finished, without making the host wait.

    Args:
        steps: steps of the whole run.
        where: the losses' device.
    """

    def __init__(self, steps: int, where: torch.device) -> None:
        self.steps, self.where = steps, where
        self.coming: deque[tuple[int, Tensor, Any]] = deque()

    def turn(self, step: int, loss: Tensor) -> None:
        """Add the loss of step `step`, and report (step, steps, loss) for every loss that has arrived."""
        copied, event = device.copy_to_host(loss), device.new_event(self.where)
        event.record()
        self.coming.append((step, copied, event))
        while self.coming and self.coming[0][2].query():
            step, copied, _ = self.coming.popleft()
            report((step, self.steps, float(copied)))
