"""The host time that a wrapper adds, measured on tiny tensors with collectives that return at once.

Rank 0 of torch's `fake` process group runs units of two Linear and two LayerNorm, on one row, so narrow that a step's
time beyond the plain module's is the Python of the wrapper. A step is forward, backward, and gradients set to None as
an optimizer's `zero_grad` does; there is no optimizer. The clock is the CPU time of the process: no step waits.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifsdp.course.bench.contest import Contest, Cost, Step, costs
from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.instruments.launch import launch

NAMES = ("plain", "torch-fsdp1", "torch-fsdp2", "our-fsdp", "our-fsdp-grad-op", "our-fsdp2")
WARM_UP = 5  # steps of a profile


class OverheadSettings(NamedTuple):
    """One run: `ranks` is the size of the fake world, `steps` the number of timed steps of each contestant."""

    units: int = 48
    ranks: int = 2
    steps: int = 120
    width: int = 8

    def build(self, name: str) -> nn.Module:
        """A contestant's model."""
        return CONTESTANTS[name].build(Narrow(self.units, self.width)).model


class Part(nn.Sequential):
    """The module of one unit."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


class Narrow(nn.Module):
    """A model of units, [rows, width] to the same shape; the root holds no parameters."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(width) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure(settings: OverheadSettings) -> dict[str, Cost]:
    """Run once in a new process: a contestant's host time beyond the plain module's, per unit and step."""
    return launch(_contest, settings.ranks, settings, backend="fake", timeout=600)[0]


def _contest(settings: OverheadSettings) -> dict[str, Cost]:
    steps = {name: _step(settings, name) for name in NAMES}
    return costs(Contest(steps, "cpu", settings.steps).run(), settings.units)


def _step(settings: OverheadSettings, name: str) -> Step:
    model = settings.build(name)
    params, row = list(model.parameters()), torch.ones(1, settings.width)

    def step(_: int) -> None:
        model(row).sum().backward()
        for p in params:
            p.grad = None

    return step


def profile(settings: OverheadSettings, name: str, rows: int = 40) -> str:
    """A contestant's cProfile: functions sorted by own time, then by cumulative time."""
    return launch(_profile, settings.ranks, settings, name, rows, backend="fake", timeout=600)[0]


def _profile(settings: OverheadSettings, name: str, rows: int) -> str:
    torch.set_num_threads(1)
    step, profiler, text = _step(settings, name), cProfile.Profile(), io.StringIO()
    for number in range(WARM_UP):
        step(number)
    with profiler:
        for number in range(settings.steps):
            step(number)
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(rows)
    stats.sort_stats("cumulative").print_stats(rows)
    return text.getvalue()
