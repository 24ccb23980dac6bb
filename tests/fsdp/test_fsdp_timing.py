"""What each schedule gains on a link: in virtual time exactly, and on the emulated link by the clock."""

import sys
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from minifsdp import comm
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.unit import Unit
from minifsdp.fsdp.view import View
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import EmulatedLink, let_communication_go_first

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LAYERS = 12
GATHER = REDUCE = 0.8  # of a unit's forward, which takes 1; its backward takes 2
SCHEDULES = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "prefetch": partial(PrefetchSchedule, depth=None),
    "limit": partial(RateLimitedSchedule, depth=None),
}


class Clock:
    """A host that computes, and a link that carries one message at a time in order of issue."""

    def __init__(self):
        self.now = self.link_free = self.blocked = 0.0

    def send(self, seconds):
        self.link_free = done = max(self.now, self.link_free) + seconds

        def wait():
            self.blocked += max(0.0, done - self.now)
            self.now = max(self.now, done)

        return SimpleNamespace(wait=wait)


class TimedUnit(Unit):
    """A unit that is time and nothing else."""

    def __init__(self, clock, size=1.0):
        super().__init__("timed")
        self.clock, self.size, self.taken = clock, size, False
        self.leaves, self.shards, self.device = [], [], torch.device("cpu")
        self.view = View([], [])

    def _gather(self):
        return self.clock.send(GATHER * self.size)

    def _release(self): ...

    def take_gradient(self, index):
        self.taken = True

    @property
    def has_gradient(self):
        return self.taken

    def _reduce(self):
        self.taken = False
        return self.clock.send(REDUCE * self.size)

    def _accumulate(self): ...

    def store(self): ...


def step(make_schedule, steps=2):
    """Seconds of forward and of backward in the last of `steps` steps, by the clock; a unit's forward takes one."""
    clock = Clock()
    root, *blocks = units = [TimedUnit(clock, 0.2), *(TimedUnit(clock) for _ in range(LAYERS))]
    root.is_root = True
    schedule = make_schedule(units)
    for _ in range(steps):
        begin = clock.now
        schedule.begin_forward()
        schedule.pre_forward(root)
        for unit in blocks:
            schedule.pre_forward(unit)
            clock.now += 1
            schedule.post_forward(unit, True)
        clock.now += 0.1
        schedule.post_forward(root, True)
        turn = clock.now
        schedule.begin_backward([*blocks, root])
        schedule.pre_backward(root)
        clock.now += 0.2
        for unit in reversed(blocks):
            schedule.pre_backward(unit)
            clock.now += 2
            unit.take_gradient(0)
            schedule.post_backward(unit)
        root.take_gradient(0)
        schedule.post_backward(root)
        schedule.end_backward()
    return turn - begin, clock.now - turn


def bound():
    """What no schedule can beat by much: the busier of compute and link, and what has nothing to hide behind."""
    forward = max(LAYERS + 0.1, GATHER * (LAYERS + 0.2))
    backward = max(2 * LAYERS + 0.2, GATHER * LAYERS + REDUCE * (LAYERS + 0.2))
    return forward + backward + 2 * GATHER + REDUCE


def test_overlap_alone_gains_little_and_prefetch_reaches_the_bound():
    times = {name: step(schedule) for name, schedule in SCHEDULES.items()}
    assert times["overlap"][0] == times["sync"][0]  # in forward nothing is issued early
    hidden = times["sync"][1] - times["overlap"][1]
    assert 0 < hidden <= REDUCE * LAYERS  # in backward only reductions can hide
    total = {name: sum(parts) for name, parts in times.items()}
    assert total["prefetch"] < 0.85 * total["overlap"]
    assert total["limit"] < 0.85 * total["overlap"]
    assert total["prefetch"] <= 1.02 * bound()
    assert total["limit"] <= 1.02 * bound()


def test_a_reduction_before_the_next_gather_hides_nothing():
    """Why the order on the link matters: the computation would wait for both."""

    class ReductionFirst(OverlapSchedule):
        def reduce(self, unit):
            super().reduce(unit)
            self.issue_reduction()

    assert step(ReductionFirst)[1] > step(OverlapSchedule)[1]
    assert step(ReductionFirst)[1] == pytest.approx(step(SyncSchedule)[1], rel=0.01)


def test_reductions_are_not_waited_for_behind_a_queue_of_gathers():
    """Unbounded prefetch fills the link; a host that waited for each reduction in turn would stand still behind it."""

    class OneReduction(PrefetchSchedule):
        def __init__(self, units):
            super().__init__(units, depth=None)
            self.reductions = 1

    assert step(SCHEDULES["prefetch"])[1] < 0.9 * step(OneReduction)[1]


# By the clock


RUNGS = ["fsdp", "fsdp-overlap", "fsdp-prefetch", "fsdp-limit"]


def measure(settings, steps):
    """Seconds by rung and by step: [forward, backward, blocked in forward, blocked in backward], on a fitting link."""
    let_communication_go_first()
    where, rank = torch.device("cpu"), dist.get_rank()
    tokens, targets = data.shard(next(settings.batches()), rank, settings.ranks)
    trainers = {name: settings.build(name, where) for name in RUNGS}
    blocked = 0.0

    @contextmanager
    def timed(call, phase):
        nonlocal blocked
        start = time.perf_counter()
        try:
            yield
        finally:
            if phase == "wait":
                blocked += time.perf_counter() - start

    def run(trainer):
        nonlocal blocked
        comm.all_reduce(torch.zeros(1), comm.world()).wait()
        blocked, marks = 0.0, [(time.perf_counter(), 0.0)]
        loss = trainer.model(tokens, targets)
        marks.append((time.perf_counter(), blocked))
        loss.backward()
        marks.append((time.perf_counter(), blocked))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return [b[i] - a[i] for i in (0, 1) for a, b in pairwise(marks)]

    comm.observers.append(timed)
    for trainer in trainers.values():
        run(trainer)
    alone = [run(trainers["fsdp"]) for _ in range(10)]
    forward = torch.tensor(median(times[0] - times[2] for times in alone) / settings.layers)
    comm.all_reduce(forward, comm.world(), comm.MEAN).wait()
    root, unit = (
        4 * u.flat.shard.numel() * (settings.ranks - 1) for u in list(trainers["fsdp"].model._engine.passes)[:2]
    )
    gather = GATHER * float(forward)
    latency, bandwidth = 0.1 * gather, unit / (0.9 * gather)
    with EmulatedLink(latency, bandwidth):
        times = {name: [] for name in RUNGS}
        for _ in range(steps):
            for name in RUNGS:
                times[name].append(run(trainers[name]))
    return times, gather, latency + root / bandwidth


@pytest.mark.slow
def test_prefetch_comes_close_to_its_bound_on_an_emulated_link():
    """A unit's gather takes 0.8 of its forward. Medians of steps that take turns: a busy machine is busy for all."""
    settings = Settings(layers=12, batch=48, context=48)
    times, gather, root = launch(measure, settings.ranks, settings, 12, timeout=300)[0]
    middle = {name: [median(column) for column in zip(*steps, strict=True)] for name, steps in times.items()}
    total = {name: median(sum(step[:2]) for step in steps) for name, steps in times.items()}
    gathers = settings.layers * gather
    assert total["fsdp-overlap"] <= 1.05 * total["fsdp"]
    forward, backward, blocked_forward, blocked_backward = middle["fsdp-prefetch"]
    bound = (
        max(forward - blocked_forward, gathers + root)
        + max(backward - blocked_backward, 2 * gathers + root)
        + 2 * gather
        + gather
    )
    print({name: round(1e3 * seconds) for name, seconds in total.items()}, "bound", round(1e3 * bound), "ms")
    assert total["fsdp-prefetch"] <= 1.15 * bound
    for name in ("fsdp-prefetch", "fsdp-limit"):
        assert total[name] < 0.9 * min(total["fsdp"], total["fsdp-overlap"]), name
