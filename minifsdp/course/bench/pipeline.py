"""The host time of a pipeline's step, ours and torch's in turn, on tiny stages, so that it is the schedule's Python.

Real ranks over gloo; a stage is one Linear of a few features. What counts is the time beyond that of the same forwards
and backwards in a loop, without a pipeline. The clock is the CPU time of the thread that trains: time in which it waits
for a message does not count, and neither does other load on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torchs
from torch.nn.functional import mse_loss

from minifsdp import pipeline as ours
from minifsdp.course.bench.contest import Contest, Cost, Step, costs
from minifsdp.course.launch import launch


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


def _one_stage(library: Any, kind: str, settings: PipelineSettings) -> Any:
    stage = library.PipelineStage(nn.Linear(settings.width, settings.width), dist.get_rank(), settings.ranks, "cpu")
    return getattr(library, kind)(stage, settings.micros, mse_loss)


def _two_stages(library: Any, kind: str, settings: PipelineSettings) -> Any:
    count = 2 * settings.ranks
    mine = range(dist.get_rank(), count, settings.ranks)
    modules = [nn.Linear(settings.width, settings.width) for _ in mine]
    stages = [library.PipelineStage(module, stage, count, "cpu") for module, stage in zip(modules, mine, strict=True)]
    return getattr(library, kind)(stages, settings.micros, mse_loss)


SCHEDULES: Mapping[str, tuple[str, Callable[[Any, str, PipelineSettings], Any]]] = {
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


def measure(settings: PipelineSettings) -> dict[str, dict[str, Cost]]:
    """Run once in new processes.

    Returns:
        By schedule and library the time of a step beyond the loop's, on the rank that takes longer by the median.
    """
    of_ranks = launch(_contest, settings.ranks, settings, timeout=600)
    return {
        name: {library: max(rank[name][library] for rank in of_ranks) for library in LIBRARIES} for name in SCHEDULES
    }


def _contest(settings: PipelineSettings) -> dict[str, dict[str, Cost]]:
    steps = {
        (name, library): _step(make(module, kind, settings), settings)
        for name, (kind, make) in SCHEDULES.items()
        for library, module in _CONTESTANTS.items()
    }
    times = Contest(steps, "thread", settings.steps).run()
    return {
        name: costs({library: times[name, library] for library in _CONTESTANTS}, beyond="loop") for name in SCHEDULES
    }


def _step(schedule: Any, settings: PipelineSettings) -> Step:
    x = torch.ones(settings.micros, settings.width)
    inputs = [x] if dist.get_rank() == 0 else []
    target = x if dist.get_rank() == settings.ranks - 1 else None

    def step(_: int) -> None:
        schedule.step(*inputs, target=target)

    return step
