"""The host time of a pipeline's step, ours and torch's in turn, on tiny stages, so that it is the schedule's Python.

Real ranks over gloo; a stage is one Linear of a few features. What counts is the time beyond that of the same forwards
and backwards in a loop, without a pipeline. The clock is the CPU time of the thread that trains: time in which it waits
for a message does not count, and neither does other load on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torchs
from torch.nn.functional import mse_loss

from minifsdp import pipeline as ours
from minifsdp.course.bench.turns import turns_without_garbage
from minifsdp.course.launch import launch

WARM_UP = 5  # steps: the first connects the ranks and says what passes


class Settings(NamedTuple):
    """One run: `steps` is the number of timed steps of each contestant."""

    ranks: int = 2
    micros: int = 8
    steps: int = 100
    width: int = 8


def _one_stage(library: Any, kind: str, settings: Settings) -> Any:
    stage = library.PipelineStage(nn.Linear(settings.width, settings.width), dist.get_rank(), settings.ranks, "cpu")
    return getattr(library, kind)(stage, settings.micros, mse_loss)


def _two_stages(library: Any, kind: str, settings: Settings) -> Any:
    count = 2 * settings.ranks
    mine = range(dist.get_rank(), count, settings.ranks)
    modules = [nn.Linear(settings.width, settings.width) for _ in mine]
    stages = [library.PipelineStage(module, stage, count, "cpu") for module, stage in zip(modules, mine, strict=True)]
    return getattr(library, kind)(stages, settings.micros, mse_loss)


SCHEDULES: Mapping[str, tuple[str, Callable[[Any, str, Settings], Any]]] = {
    "gpipe": ("ScheduleGPipe", _one_stage),
    "1f1b": ("Schedule1F1B", _one_stage),
    "interleaved": ("ScheduleInterleaved1F1B", _two_stages),
}
LIBRARIES = {"torch": torchs, "ours": ours}


class _Loop:
    """The computation of a rank's stages and nothing else; a `PipelineStage` and a schedule to the functions above."""

    def __init__(self, modules: Any, micros: int, loss_fn: Callable[..., Tensor]) -> None:
        self.modules = modules if isinstance(modules, list) else [modules]
        self.micros, self.loss_fn = micros, loss_fn

    def step(self, *args: Any, target: Tensor | None = None) -> None:
        for module in self.modules:
            width = module.in_features
            for micro in torch.ones(self.micros, width).tensor_split(self.micros):
                y = module(micro.detach().requires_grad_())
                if target is not None and module is self.modules[-1]:
                    self.loss_fn(y, micro).backward()
                else:
                    y.backward(micro)


class _Loops:
    """The same names as the libraries'."""

    ScheduleGPipe = Schedule1F1B = ScheduleInterleaved1F1B = _Loop

    @staticmethod
    def PipelineStage(module: nn.Module, *_: Any) -> nn.Module:  # noqa: N802
        return module


_CONTESTANTS: dict[str, Any] = {**LIBRARIES, "loop": _Loops}


class Cost(NamedTuple):
    """Seconds of a step beyond the loop's, of one schedule on the rank that takes longer, by medians of all steps."""

    torch: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.torch


def measure(settings: Settings) -> dict[str, Cost]:
    """Run once in new processes: a step of each contestant in turn."""
    of_ranks = launch(_time, settings.ranks, settings, timeout=600)
    found = {}
    for name in SCHEDULES:
        medians = [{library: median(seconds[name, library]) for library in _CONTESTANTS} for seconds in of_ranks]
        beyond = [max(rank[library] - rank["loop"] for rank in medians) for library in LIBRARIES]
        found[name] = Cost(*beyond)
    return found


def _time(settings: Settings) -> dict[tuple[str, str], list[float]]:
    """Seconds of each step, by schedule and library."""
    torch.set_num_threads(1)
    contestants = {
        (name, library): make(module, kind, settings)
        for name, (kind, make) in SCHEDULES.items()
        for library, module in _CONTESTANTS.items()
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    x = torch.ones(settings.micros, settings.width)
    first, last = dist.get_rank() == 0, dist.get_rank() == settings.ranks - 1
    for number, key, schedule in turns_without_garbage(contestants, WARM_UP + settings.steps):
        dist.barrier()
        start = time.thread_time()
        schedule.step(*([x] if first else []), target=x if last else None)
        taken = time.thread_time() - start
        if number >= WARM_UP:
            seconds[key].append(taken)
    return seconds
