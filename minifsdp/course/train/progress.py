"""Losses on their way to the screen."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.launch import report


class Dial:
    """Shows the loss of the last step that the device has finished; the host does not wait for one to finish.

    Args:
        steps: of the whole run.
        where: the losses' device.
    """

    def __init__(self, steps: int, where: torch.device) -> None:
        self.steps, self.where = steps, where
        self.coming: deque[tuple[int, Tensor, Any]] = deque()

    def turn(self, step: int, loss: Tensor) -> None:
        """`loss` is that of step `step`; reports (step, steps, loss) of those that have arrived."""
        copied, event = device.copy_to_host(loss), device.new_event(self.where)
        event.record()
        self.coming.append((step, copied, event))
        while self.coming and self.coming[0][2].query():
            step, copied, _ = self.coming.popleft()
            report((step, self.steps, float(copied)))
