"""A contest: on every rank all contestants take steps in turn, and one clock times them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from minifsdp import comm, device
from minifsdp.course.bench.interleave import interleave, without_garbage
from minifsdp.instruments.watch.step import align

CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,  # of all threads of the process: other load on the machine does not count
    "thread": time.thread_time,  # nor does time in which the thread waits for a message
}
CPU = torch.device("cpu")

K = TypeVar("K", bound=Hashable)
Step = Callable[[int], Any]
"""A contestant's step, which takes the number of the round and may return the loss."""


class Times(NamedTuple):
    """A contestant's results on one rank.

    Attributes:
        seconds: of the timed steps.
        losses: of all steps, if these return any.
        messages: collectives in a step before the timed ones; 0 for torch's contestants, where they are not counted.
    """

    seconds: list[float]
    losses: list[float]
    messages: int


@dataclass(frozen=True)
class Contest(Generic[K]):
    """The settings of one contest.

    Attributes:
        contestants: each one's step.
        clock: of `CLOCKS`.
        steps: timed steps of each contestant.
        warm_up: steps before them: Python specialises hot code, and the first step connects ranks, creates the
            optimizer's state and learns the order of units.
        quiet: one thread, and Python's garbage collector only between steps, which are so short that either would show.
    """

    contestants: Mapping[K, Step]
    clock: Literal["wall", "cpu", "thread"]
    steps: int
    warm_up: int = 5
    quiet: bool = True

    def run(self, where: torch.device = CPU, advance: Callable[[K, bool], Any] = lambda *_: None) -> dict[K, Times]:
        """Take all steps.

        Args:
            where: this rank's device.
            advance: hears after each step whose it was, and whether it was timed.
        """
        read, found = CLOCKS[self.clock], {key: Times([], [], 0) for key in self.contestants}
        if self.quiet:
            torch.set_num_threads(1)
        with without_garbage() if self.quiet else nullcontext():
            for number, key, step in interleave(self.contestants, self.warm_up + self.steps):
                timed = number >= self.warm_up
                if self.quiet:
                    gc.collect()
                align(where)
                with nullcontext() if timed else comm.record() as log:
                    start = read()
                    loss = step(number)
                    device.synchronize(where)
                    seconds = read() - start
                if log is None:
                    found[key].seconds.append(seconds)
                else:
                    found[key] = found[key]._replace(messages=len(log))
                if loss is not None:
                    found[key].losses.append(float(loss))
                advance(key, timed)
        return found


class Cost(NamedTuple):
    """The time of a contestant's step, in seconds per part of the model.

    Attributes:
        median: of all steps.
        quartiles: the first and the third.
        messages: as in `Times`.
    """

    median: float
    quartiles: tuple[float, float]
    messages: int


Runs = Sequence[Mapping[str, Cost]]


def costs(times: Mapping[str, Times], parts: int = 1, beyond: str = "plain") -> dict[str, Cost]:
    """The costs of all contestants but `beyond`, which computes and does nothing else: the time beyond its median."""
    plain = median(times[beyond].seconds) if beyond in times else 0.0
    found = {}
    for name, each in times.items():
        low, middle, high = ((float(at) - plain) / parts for at in np.quantile(each.seconds, (0.25, 0.5, 0.75)))
        if name != beyond:
            found[name] = Cost(middle, (low, high), each.messages)
    return found


def ratio(runs: Runs, ours: str, theirs: str) -> float:
    """The median over all runs of the ratio of `ours` to `theirs`, each a median of steps."""
    return round(median(run[ours].median / run[theirs].median for run in runs), 4)


def exceeded(what: str, ours: str, theirs: str, ratio: float, limit: float) -> list[str]:
    """A line that says that a ratio exceeds its limit, if it does."""
    return [f"{what}: {ours} costs {ratio:.3f} x {theirs}, more than {limit:g}"] if ratio > limit else []


def microseconds(seconds: float, digits: int = 2) -> float:
    """As records have them."""
    return round(1e6 * seconds, digits)
