"""The host time that a wrapper adds, measured on tiny tensors with collectives that return at once.

Rank 0 of torch's `fake` process group runs units of two Linear and two LayerNorm, on one row, so narrow that a step's
time beyond the plain module's is the Python of the wrapper. A step is forward, backward, and gradients set to None as
an optimizer's `zero_grad` does; there is no optimizer. Messages are counted in the steps before those that are timed.
The clock is the CPU time of the process.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from minifsdp import comm
from minifsdp.course.bench.turns import turns_without_garbage
from minifsdp.course.launch import launch
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from minifsdp.fsdp2 import fully_shard

WARM_UP = 5  # steps: the first learns the order of units, and Python specialises hot code


class Part(nn.Sequential):
    """The module of one unit."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


def _torch_fsdp1(model: nn.Module) -> nn.Module:
    return TorchFSDP(model, auto_wrap_policy=ModuleWrapPolicy({Part}), device_id=torch.device("cpu"))


def _fsdp2(model: nn.Module, fully_shard: Callable[..., Any]) -> nn.Module:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # the default is the accelerator, if there is one
    for part in model.children():
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _our_fsdp(model: nn.Module, strategy: ShardingStrategy) -> nn.Module:
    return FullyShardedDataParallel(model, None, strategy, auto_wrap_policy={Part})


CONTESTANTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "torch-fsdp1": _torch_fsdp1,
    "torch-fsdp2": partial(_fsdp2, fully_shard=torch_fully_shard),
    "our-fsdp": partial(_our_fsdp, strategy=ShardingStrategy.FULL_SHARD),
    "our-fsdp-grad-op": partial(_our_fsdp, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "our-fsdp2": partial(_fsdp2, fully_shard=fully_shard),
}
"""Wrappers of a fresh model, by name, with default arguments unless stated. The root holds no parameters."""


class Settings(NamedTuple):
    """One run: `ranks` is the size of the fake world, `steps` the number of timed steps of each contestant."""

    units: int = 48
    ranks: int = 2
    steps: int = 120
    width: int = 8


class Cost(NamedTuple):
    """A contestant's host time beyond the plain module's, in seconds per unit and step.

    Attributes:
        median: of all steps.
        quartiles: the first and the third.
        messages: collectives in a step; 0 for torch's contestants, where they are not counted.
    """

    median: float
    quartiles: tuple[float, float]
    messages: int


def measure(settings: Settings) -> dict[str, Cost]:
    """Run once in a new process: a step of each contestant in turn, the plain module included."""
    seconds, messages = launch(_time, settings.ranks, settings, backend="fake", timeout=600)[0]
    return costs(seconds, messages, settings.units)


def costs(seconds: Mapping[str, Sequence[float]], messages: Mapping[str, int], units: int) -> dict[str, Cost]:
    """Compute the costs from the seconds of each step of each contestant."""
    plain = median(seconds["plain"])
    found = {}
    for name, steps in seconds.items():
        low, middle, high = ((float(at) - plain) / units for at in np.quantile(steps, (0.25, 0.5, 0.75)))
        if name != "plain":
            found[name] = Cost(middle, (low, high), messages[name])
    return found


def ratio(runs: Sequence[Mapping[str, Cost]], ours: str, theirs: str) -> float:
    """The median over all runs of the ratio of `ours` to `theirs`, each a median of steps."""
    return median(run[ours].median / run[theirs].median for run in runs)


def profile(settings: Settings, name: str, rows: int = 40) -> str:
    """A contestant's cProfile: functions sorted by own time, then by cumulative time."""
    return launch(_profile, settings.ranks, settings, name, rows, backend="fake", timeout=600)[0]


class _Stepper:
    """A contestant's model, parameters and input."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.model = CONTESTANTS[name](nn.Sequential(*(Part(settings.width) for _ in range(settings.units))))
        self.params = list(self.model.parameters())
        self.row = torch.ones(1, settings.width)

    def step(self) -> None:
        self.model(self.row).sum().backward()
        for p in self.params:
            p.grad = None


def _time(settings: Settings) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each step, and messages in each of those before, by contestant."""
    torch.set_num_threads(1)
    steppers = {name: _Stepper(name, settings) for name in CONTESTANTS}
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    messages = dict.fromkeys(steppers, 0)
    for number, name, stepper in turns_without_garbage(steppers, WARM_UP + settings.steps):
        if number < WARM_UP:
            with comm.record() as log:
                stepper.step()
            messages[name] = len(log)
        else:
            start = time.process_time()  # no step waits, and other load on the machine does not count
            stepper.step()
            seconds[name].append(time.process_time() - start)
    return seconds, messages


def _profile(settings: Settings, name: str, rows: int) -> str:
    torch.set_num_threads(1)
    stepper, profiler, text = _Stepper(name, settings), cProfile.Profile(), io.StringIO()
    for _ in range(WARM_UP):
        stepper.step()
    with profiler:
        for _ in range(settings.steps):
            stepper.step()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(rows)
    stats.sort_stats("cumulative").print_stats(rows)
    return text.getvalue()
