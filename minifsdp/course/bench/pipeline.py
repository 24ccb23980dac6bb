"""The host time of a pipeline's step, ours and torch's in turn, on tiny stages, so that it is the schedule's Python.

Real ranks over gloo; a stage is one Linear of a few features. What counts is the time beyond that of the same forwards
and backwards in a loop, without a pipeline. The clock is the CPU time of the thread that trains: time in which it waits
for a message does not count, and neither does other load on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torchs
from torch.nn.functional import mse_loss

from minifsdp import pipeline as ours
from minifsdp.course.bench.contest import Contest, Cost, Step, costs
from minifsdp.instruments.launch import launch


class PipelineSettings(NamedTuple):
    """One run: `steps` is the number of timed steps of each contestant."""

    ranks: int = 2
    micros: int = 8
    steps: int = 100
    width: int = 8

    def check(self) -> None:
        """Refuse what the schedules cannot do.

        Raises:
            ValueError: the micro-batches do not come in twos.
        """
        if self.micros < 2 or self.micros % 2:
            raise ValueError(f"--micros {self.micros}: give a multiple of 2")


SCHEDULES = {"gpipe": ("ScheduleGPipe", 1), "1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2)}
"""A class of each library, and the stages of a rank."""
LIBRARIES: Mapping[str, Any] = {"torch": torchs, "ours": ours}


def measure(settings: PipelineSettings) -> dict[str, dict[str, Cost]]:
    """Run once in new processes.

    Returns:
        By schedule and library the time of a step beyond the loop's, on the rank that takes longer by the median.
    """
    of_ranks = launch(_contest, settings.ranks, settings, timeout=600)
    return {name: {each: max(rank[name][each] for rank in of_ranks) for each in LIBRARIES} for name in SCHEDULES}


def _contest(settings: PipelineSettings) -> dict[str, dict[str, Cost]]:
    steps: dict[tuple[str, str], Step] = {}
    last = dist.get_rank() == settings.ranks - 1
    for name, (kind, count) in SCHEDULES.items():
        steps[name, "loop"] = partial(_loop, settings, _modules(settings, count), last)
        for each, library in LIBRARIES.items():
            steps[name, each] = _step(library, kind, _modules(settings, count), settings)
    times = Contest(steps, "thread", settings.steps).run()
    return {name: costs({who: times[name, who] for who in ("loop", *LIBRARIES)}, beyond="loop") for name in SCHEDULES}


def _modules(settings: PipelineSettings, count: int) -> list[nn.Linear]:
    return [nn.Linear(settings.width, settings.width) for _ in range(count)]


def _loop(settings: PipelineSettings, modules: Sequence[nn.Linear], last: bool, _: int) -> None:
    """The computation of a rank's stages, the `last` of which has the loss, and nothing else."""
    for module in modules:
        for micro in torch.ones(settings.micros, settings.width).tensor_split(settings.micros):
            y = module(micro.detach().requires_grad_())
            if last and module is modules[-1]:
                mse_loss(y, micro).backward()
            else:
                y.backward(micro)


def _step(library: Any, kind: str, modules: Sequence[nn.Module], settings: PipelineSettings) -> Step:
    rank, last, count = dist.get_rank(), settings.ranks - 1, len(modules) * settings.ranks
    stages = [
        library.PipelineStage(module, rank + at * settings.ranks, count, "cpu") for at, module in enumerate(modules)
    ]
    schedule = getattr(library, kind)(stages if len(stages) > 1 else stages[0], settings.micros, mse_loss)
    x = torch.ones(settings.micros, settings.width)
    inputs, target = [x] if rank == 0 else [], x if rank == last else None

    def step(_: int) -> None:
        schedule.step(*inputs, target=target)

    return step
