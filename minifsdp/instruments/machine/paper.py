"""Record a run of any size without its hardware: rank 0 of N in a fake process group, with tensors without memory.

The real code runs: modules, units, schedule, autograd, optimizer. Only the values are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.batch import Batch
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.absent import Absent
from minifsdp.instruments.machine.program import Program
from minifsdp.instruments.machine.recorder import record_steps
from minifsdp.private import FakeTensorMode, unset_fake_temporarily
from minifsdp.trainer import Trainer


class PaperGroup:
    """A process group of `ranks` in which only rank 0 exists."""

    group_name = "paper"
    _device_types = (torch.device("cpu"),)  # served by its backend

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._ranks

    def _get_backend(self, device: torch.device) -> PaperGroup:
        return self

    def name(self) -> str:
        return "paper"


class _Nowhere:
    """A link that carries nothing and completes at once."""

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> _Nowhere:
        return self

    def wait(self) -> None: ...


def record_on_paper(build: Callable[[Any], Trainer], batch: Callable[[], Batch], ranks: int, steps: int = 2) -> Program:
    """Record the program of rank 0 of `ranks`, as `record_steps` would there.

    Args:
        build: makes model and optimizer, given the process group; its tensors have no memory.
        batch: makes one step's arguments of the model, which returns its loss.
        ranks: N.
        steps: number of steps; the first has no gather order to follow yet, and creates the optimizer's state.
    """
    absent = patch.object(Absent, "like", _absent_like)
    with _carried_nowhere(), absent, FakeTensorMode():
        return record_steps(partial(_built, build, PaperGroup(ranks)), batch(), steps)


def _built(build: Callable[[Any], Trainer], group: PaperGroup) -> Trainer:
    """Build the trainer, then free every unit again: viewing an empty storage with a fake tensor resizes it."""
    trainer = build(group)
    for module in FullyShardedDataParallel.fsdp_modules(trainer.model):
        if module._unit is not None:
            device.free(module._unit.buffers["parameters"])
    return trainer


def _absent_like(leaf: Tensor) -> Absent:
    """A real `Absent`: a fake tensor cannot have a second subclass."""
    with unset_fake_temporarily():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").as_subclass(Absent)


@contextmanager
def _carried_nowhere() -> Iterator[None]:
    before, comm.link = comm.link, _Nowhere()
    try:
        yield
    finally:
        comm.link = before
