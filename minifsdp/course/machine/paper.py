"""A run at any size without the machine for it: rank 0 of N on a group of paper, with tensors that have no memory.

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
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.course.machine.program import Program
from minifsdp.course.machine.recorder import record_steps
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.absent import Absent
from minifsdp.private import FakeTensorMode, unset_fake_temporarily


class PaperGroup:
    """Rank 0 of `ranks` that are not there."""

    group_name = "paper"
    _device_types = (torch.device("cpu"),)  # that its backend would serve

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
    """A link that carries nothing, at once."""

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> _Nowhere:
        return self

    def wait(self) -> None: ...


def record_on_paper(build: Callable[[Any], Trainer], batch: Callable[[], Batch], ranks: int, steps: int = 2) -> Program:
    """The program of some steps at rank 0 of `ranks`, as `record_steps` would record it there.

    Args:
        build: makes model and optimizer, given the process group; what it allocates has no memory behind it.
        batch: makes a step's arguments of the model, which returns its loss.
        ranks: N.
        steps: how many; the first gathers without an order to follow, and makes the optimizer's state.
    """
    absent = patch.object(Absent, "like", _absent_like)
    with _carried_nowhere(), absent, FakeTensorMode():
        return record_steps(partial(_built, build, PaperGroup(ranks)), batch(), steps)


def _built(build: Callable[[Any], Trainer], group: PaperGroup) -> Trainer:
    """Frees every unit once more: fake tensors that view a storage without memory give it some."""
    trainer = build(group)
    for module in FullyShardedDataParallel.fsdp_modules(trainer.model):
        if module._unit is not None:
            device.free(module._unit.buffers["parameters"])
    return trainer


def _absent_like(leaf: Tensor) -> Absent:
    """A real one: fake tensors are a subclass themselves, and have none."""
    with unset_fake_temporarily():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").as_subclass(Absent)


@contextmanager
def _carried_nowhere() -> Iterator[None]:
    before, comm.link = comm.link, _Nowhere()
    try:
        yield
    finally:
        comm.link = before
