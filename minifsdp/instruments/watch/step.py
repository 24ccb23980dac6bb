"""One step of a trainer, for whatever watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.batch import Batch, to_device
from minifsdp.trainer import Trainer


def take_step(
    trainer: Trainer, batch: Batch, where: torch.device, tell: Callable[[str], Any] = lambda phase: None
) -> Tensor:
    """A step on this rank's rows; `tell` as for `Trainer.step`."""
    return trainer.step(*to_device(batch, where), tell)


def align(where: torch.device) -> None:
    """Wait for all ranks, so that none starts its clock early."""
    comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()
    device.synchronize(where)  # on CUDA only the stream has waited, not the host with the clock
