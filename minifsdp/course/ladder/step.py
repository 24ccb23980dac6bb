"""One step of a trainer, for whatever watches it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from minifsdp import comm, device
from minifsdp.course.ladder import data
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.rungs import Trainer


def take_step(
    trainer: Trainer, batch: Batch, where: torch.device, tell: Callable[[str], Any] = lambda phase: None
) -> Tensor:
    """Forward, backward, optimizer; `tell` gets the name of each as it begins, and "rest" before `zero_grad`.

    A pipeline also tells its actions, such as "0F1".
    """
    tokens, targets = data.to_device(batch, where)
    both = trainer.both or partial(_one_after_the_other, trainer)
    loss = both(tokens, targets, tell)
    tell("optimizer")
    with record_function("optimizer"):
        trainer.optimizer.step()
        tell("rest")
        trainer.optimizer.zero_grad()
    return loss.detach()


def _one_after_the_other(trainer: Trainer, tokens: Tensor, targets: Tensor, tell: Callable[[str], Any]) -> Tensor:
    tell("forward")
    with record_function("forward"):
        loss: Tensor = trainer.model(tokens, targets)
    tell("backward")
    with record_function("backward"):
        loss.backward()
        trainer.after_backward()
    return loss


def align(where: torch.device) -> None:
    """Wait for all ranks, so that none starts its clock early."""
    comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()
    device.synchronize(where)  # on CUDA only the stream has waited, not the host with the clock
