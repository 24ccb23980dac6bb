"""Measured step times of schedules beside the model's predictions, the only place where the model is validated.

    results = versus(Settings(), {"sync": SyncSchedule, "overlap": OverlapSchedule})
    results["overlap"].median, results["overlap"].predicted, results["overlap"].error

The ranks train on the emulated link, where the host computes, and a model of exactly that machine predicts their step
time. If the prediction holds, the same program on a simulated GPU differs only in the hardware's numbers and in a host
that runs ahead, which cannot be measured here.

The model's inputs are the program, the link's latency and bandwidth, and the compute seconds of a step: the median of
the measured step times less their waits. It therefore predicts the waiting, and so the communication that each schedule
hides. Kernels keep their recorded proportions, equal for one kind and size, and absorb the Python time between them.

Compute seconds are measured per schedule: gloo's real collectives take processor time from concurrent compute
(carriers.py), the more the more is hidden, and a model of the link does not include that. Not modelled, and so part of
the error: a thread's late wake-up after each wait, waits for the slower rank, and other processes that slow one rank
and not the other. Predictions are therefore mostly low: on an otherwise idle machine by up to a tenth of the step, and
by more of the waiting alone (`waiting_error`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.optim import AdamW

from minifsdp import comm
from minifsdp.batch import Batch, shard
from minifsdp.build import LEARNING_RATE
from minifsdp.comm import Call
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.torch_api.api import MakeSchedule
from minifsdp.gpt import Block
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.machine.hardware import Hardware, measured
from minifsdp.instruments.machine.program import Kernel, Program
from minifsdp.instruments.machine.recorder import record_steps
from minifsdp.instruments.machine.replay import Run, replay
from minifsdp.instruments.watch.step import align, take_step
from minifsdp.trainer import Trainer

_RECORDED = 2  # steps of a program; in the last the gather order is known and the optimizer's state exists
_CPU = torch.device("cpu")


class Training(Protocol):
    """A model and its batches, such as the ladder's settings."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    def model(self) -> Any:
        """A model, the same on each rank."""

    def batches(self) -> Iterator[Batch]:
        """Batches for all ranks."""


@dataclass(frozen=True)
class Versus:
    """One schedule, measured and predicted.

    Attributes:
        measured: seconds of each step, on the slowest rank.
        computing: median seconds per step that the longest-computing rank does not wait.
        program: rank 0's program of two steps.
        hardware: the model of this machine and its link. With `runs_ahead` replaced by True it is the same machine
            with a host that runs ahead, of which there is no measurement.
    """

    measured: list[float]
    computing: float
    program: Program
    hardware: Hardware

    @property
    def median(self) -> float:
        """Median of the measured seconds."""
        return median(self.measured)

    @cached_property
    def run(self) -> Run:
        """The simulated run, for its timeline."""
        return replay(self.program, self.hardware)

    @property
    def predicted(self) -> float:
        """Predicted seconds of a step."""
        return self.run.seconds

    @property
    def error(self) -> float:
        """Relative error of the prediction: negative if it was too short."""
        return self.predicted / self.median - 1

    @property
    def waiting_error(self) -> float:
        """Relative error of the predicted waiting, a step's time less its computing; inf without waiting."""
        waited = self.median - self.computing
        return (self.predicted - self.computing) / waited - 1 if waited > 0 else inf


def gains(one: Versus, other: Versus) -> list[float]:
    """The fraction of a step of `other` that `one` saves, per turn and sorted; all of one sign if the turns agree."""
    return sorted(1 - mine / its for mine, its in zip(one.measured, other.measured, strict=True))


class _Step(NamedTuple):
    """One rank's measurement of a step.

    Attributes:
        seconds: from the barrier of all ranks to the step's end.
        waited: seconds in which the host waited for collectives.
    """

    seconds: float
    waited: float


def versus(
    settings: Training,
    schedules: Mapping[str, MakeSchedule],
    link: str = "latency=2ms,bandwidth=50MB/s",
    steps: int = 5,
) -> dict[str, Versus]:
    """Train with each schedule on an emulated link; measure and predict the step times.

    The ranks start once. The schedules take turns step by step, so that a temporary load on the machine affects all
    of them.

    Args:
        settings: such as the ladder's, of which ranks, batch, layers, width, context and seed are used; every step has
            the same batch.
        schedules: `schedule` arguments of `FullyShardedDataParallel`, by name.
        link: text for `parse_link`.
        steps: number of timed steps per schedule.

    Raises:
        ValueError: the link's text is invalid.
        RankError: a schedule raised.
    """
    wire = parse_link(link)
    ranks = launch(_train, settings.ranks, settings, dict(schedules), link, steps, timeout=180, backend="gloo")
    programs = {name: _evened(program) for name, program in ranks[0][0].items()}
    results = {}
    for name in schedules:
        turns = list(zip(*(times[name] for _, times in ranks), strict=True))
        computing = median(max(step.seconds - step.waited for step in turn) for turn in turns)
        hardware = measured(programs[name], wire.latency, wire.bandwidth, _RECORDED * computing)
        seconds = [max(step.seconds for step in turn) for turn in turns]
        results[name] = Versus(seconds, computing, programs[name], hardware)
    return results


def _train(
    settings: Training, schedules: Mapping[str, MakeSchedule], link: str, steps: int
) -> tuple[dict[str, Program], dict[str, list[_Step]]]:
    """On each rank, record every schedule without the link, then time all on it."""
    let_communication_go_first()
    rank = dist.get_rank()
    batch = shard(next(settings.batches()), rank, settings.ranks)
    trainers: dict[str, Trainer] = {}
    programs = {}
    for name, schedule in schedules.items():
        programs[name] = record_steps(partial(_build, settings, schedule, name, trainers), batch, _RECORDED)
    times: dict[str, list[_Step]] = {name: [] for name in schedules}
    with parse_link(link):
        for _ in range(steps):
            for name, trainer in trainers.items():
                times[name].append(_timed_step(trainer, batch))
    return programs if rank == 0 else {}, times


def _build(settings: Training, schedule: MakeSchedule, name: str, trainers: dict[str, Trainer]) -> Trainer:
    """A fresh trainer, stored in `trainers` for timing; recording also warms it up."""
    model = FullyShardedDataParallel(settings.model(), auto_wrap_policy={Block}, schedule=schedule)
    trainers[name] = Trainer(model, AdamW(model.parameters(), LEARNING_RATE))
    return trainers[name]


def _evened(program: Program) -> Program:
    """The program with each kernel's seconds replaced by the median of its kind and size, against outliers."""
    seconds: defaultdict[tuple[str, float, int], list[float]] = defaultdict(list)
    for each in program.instructions:
        if isinstance(each, Kernel):
            seconds[each.name, each.flops, each.nbytes].append(each.seconds)
    middle = {kind: median(several) for kind, several in seconds.items()}
    instructions = [
        each._replace(seconds=middle[each.name, each.flops, each.nbytes]) if isinstance(each, Kernel) else each
        for each in program.instructions
    ]
    return Program(instructions, program.buffers)


def _timed_step(trainer: Trainer, batch: Batch) -> _Step:
    waited = 0.0

    @contextmanager
    def watch(call: Call, phase: Literal["issue", "wait"]) -> Iterator[None]:
        nonlocal waited
        start = time.perf_counter()
        yield
        if phase == "wait":
            waited += time.perf_counter() - start

    align(_CPU)
    comm.observers.append(watch)
    try:
        start = time.perf_counter()
        take_step(trainer, batch, _CPU)
        return _Step(time.perf_counter() - start, waited)
    finally:
        comm.observers.remove(watch)
