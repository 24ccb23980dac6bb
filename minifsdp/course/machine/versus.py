"""Schedules by the clock beside what the model says of them: the one place where the model meets a measurement.

    results = versus(Settings(), {"sync": SyncSchedule, "overlap": OverlapSchedule})
    results["overlap"].median, results["overlap"].predicted, results["overlap"].error

The ranks train on the emulated link, where the host is the compute, and a model of exactly that machine predicts their
step. If it does, the same program on a paper GPU differs in the hardware's numbers and in a host that runs ahead,
which nothing here can measure.

The model is given the program; the link's latency and bandwidth; and the seconds for which a step computes: what the
measured steps took less what they waited, in the median. So what it predicts is the waiting, and by that what each
schedule hides. Kernels keep the proportions that they had while recorded, those of one kind and size the same, and
Python between them is spread over them.

The seconds of computing are each schedule's own: gloo's real collectives take processor time from what computes beside
them (carriers.py), more of it the more is hidden, and no model of the link knows of that. Left out, and so in the
error: that a thread wakes late after each wait, and waits for the slower of the ranks; that what else runs on the
machine slows one rank and not the other. So predictions are mostly short: where nothing else ran, by up to a tenth of
the step, and of the waiting alone by more (`waiting_error`).
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
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import AdamW

from minifsdp import comm
from minifsdp.comm import Call
from minifsdp.course.ladder import data
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.measure import Settings, align, take_step
from minifsdp.course.ladder.model import Block
from minifsdp.course.ladder.rungs import LEARNING_RATE, Trainer
from minifsdp.course.launch import launch
from minifsdp.course.link.emulated import let_communication_go_first, parse_link
from minifsdp.course.machine.hardware import Hardware, measured
from minifsdp.course.machine.program import Kernel, Program
from minifsdp.course.machine.recorder import record_steps
from minifsdp.course.machine.replay import Run, replay
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.torch_api.api import MakeSchedule

_RECORDED = 2  # steps of a program; the last is replayed with an order to follow and the optimizer's state made
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Versus:
    """One schedule, measured and predicted.

    Attributes:
        measured: seconds of each step, of the slowest rank.
        computing: seconds of a step in which the rank that computes longest does not wait: the median.
        program: what rank 0 asked for in two steps.
        hardware: this machine on its link, as the model has it. With `runs_ahead` replaced by True it is the same
            machine, if its host ran ahead: then nothing was measured.
    """

    measured: list[float]
    computing: float
    program: Program
    hardware: Hardware

    @property
    def median(self) -> float:
        """Of the measured seconds."""
        return median(self.measured)

    @cached_property
    def run(self) -> Run:
        """The model's, for its timeline."""
        return replay(self.program, self.hardware)

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return self.run.seconds

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the median: negative where it was too short."""
        return self.predicted / self.median - 1

    @property
    def waiting_error(self) -> float:
        """The same of what is really predicted, the waiting: what lies between a step and its computing."""
        waited = self.median - self.computing
        return (self.predicted - self.computing) / waited - 1 if waited > 0 else inf


def gains(one: Versus, other: Versus) -> list[float]:
    """The share of a step that `one` saves over `other`, for each turn, sorted: of one sign if the turns agree."""
    return sorted(1 - mine / its for mine, its in zip(one.measured, other.measured, strict=True))


class _Step(NamedTuple):
    """A step as one rank measured it.

    Attributes:
        seconds: from the moment at which all ranks were there.
        waited: seconds of it in which the host stood still until a collective was over.
    """

    seconds: float
    waited: float


def versus(
    settings: Settings,
    schedules: Mapping[str, MakeSchedule],
    link: str = "latency=2ms,bandwidth=50MB/s",
    steps: int = 5,
) -> dict[str, Versus]:
    """Train with each schedule on an emulated link, by the clock and by the model.

    The ranks start once. Steps of the schedules take turns, so that a machine that is busy for a while is busy for all
    of them.

    Args:
        settings: ranks, batch, layers, width, context and seed are used; every step has the same batch.
        schedules: by name, what `FullyShardedDataParallel` takes as its `schedule`.
        link: as `parse_link` reads it.
        steps: how many of each schedule are timed.

    Raises:
        ValueError: the link's text is none.
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
    settings: Settings, schedules: Mapping[str, MakeSchedule], link: str, steps: int
) -> tuple[dict[str, Program], dict[str, list[_Step]]]:
    """On each rank: record every schedule, without the link; then time them on it."""
    let_communication_go_first()
    rank = dist.get_rank()
    batch = data.shard(next(settings.batches()), rank, settings.ranks)
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


def _build(settings: Settings, schedule: MakeSchedule, name: str, trainers: dict[str, Trainer]) -> Trainer:
    """A fresh trainer, kept among the others: what has been recorded has also been warmed up."""
    model = FullyShardedDataParallel(settings.model(), auto_wrap_policy={Block}, schedule=schedule)
    trainers[name] = Trainer(model, AdamW(model.parameters(), LEARNING_RATE))
    return trainers[name]


def _evened(program: Program) -> Program:
    """The program with the median of their seconds for all kernels of one kind and size: one may have been held up."""
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
