"""An emulated link's carrier on CUDA: a delay on a stream of its own, in GPU cycles.

For each message, in the order of issue:

    link     start, spin(time - expected cost of the collective), the collective, wait for floor, end
    floor    spin(time)

The spin on `floor` keeps a message from being faster than the link: a collective's cost is known from earlier ones
only, and the first of its kind connects, or waits for a late peer. A GPU counts cycles of a clock that changes, so each
of these spins measures that clock for the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from minifsdp import device
from minifsdp.comm import Call
from minifsdp.instruments.link.carriers import TWO_SIDED, Costs, Seconds, Transfer
from minifsdp.private import spin


@dataclass(slots=True)
class _Kernels:
    """A message queued on the link's stream and on its floor, between timed events.

    `collective` holds its tensors until it is waited for: NCCL releases them when the link's stream waits, which is
    too early for the caller's. `left` is a send or receive under way.
    """

    call: Call
    collective: Callable[[], Any] | None
    cycles: int
    start: Any = None
    begun: Any = None
    spun: Any = None
    delayed: Any = None
    done: Any = None
    end: Any = None
    left: Any = None

    def wait(self) -> None:
        """Make the current stream wait for the message; the host runs on."""
        torch.cuda.current_stream().wait_event(self.end)
        if self.left is not None:
            self.left.wait()
        self.collective = self.left = None


class StreamCarrier:
    """The link on CUDA; its interface is that of `carriers.ThreadCarrier`."""

    def __init__(self, seconds: Seconds, transfers: list[Transfer]) -> None:
        self._seconds, self._transfers = seconds, transfers
        self._costs = Costs()
        # NCCL's priority over kernels that compute
        self._link, self._floor = (device.new_stream(torch.device("cuda"), priority=-1) for _ in range(2))
        self._clock = _Clock()
        self._under_way: deque[_Kernels] = deque()
        torch.cuda.synchronize()
        self._origin, self._origin_at = _event(), time.perf_counter()

    def submit(self, call: Call, collective: Callable[[], Any]) -> _Kernels:
        self._collect()
        seconds = self._seconds(call)
        kernels = _Kernels(call, collective, self._clock.cycles(seconds))
        self._link.wait_stream(torch.cuda.current_stream())  # it writes the collective's input
        with torch.cuda.stream(self._link):
            kernels.start = _event()
            self._floor.wait_stream(self._link)
            with torch.cuda.stream(self._floor):
                kernels.begun = _event()
                spin(kernels.cycles)
                kernels.spun = _event()
            spin(self._clock.cycles(max(0.0, seconds - self._costs.expected(call))))
            kernels.delayed = _event()
            work = collective()
            if call.op in TWO_SIDED:
                kernels.left = work  # waiting for a receive here would make the link half-duplex
            else:
                work.wait()  # the link's stream waits, so that no message overtakes another
            kernels.done = _event()
            self._link.wait_stream(self._floor)
            kernels.end = _event()
        self._under_way.append(kernels)
        return kernels

    def close(self, abandon: bool) -> None:
        if not abandon:
            self._link.synchronize()
            self._collect()

    def _collect(self) -> None:
        """List the messages that are over, and learn from them, without blocking the host."""
        while self._under_way and self._under_way[0].end.query():
            over = self._under_way.popleft()
            cost = over.delayed.elapsed_time(over.done) / 1e3
            self._costs.learn(over.call, min(cost, self._seconds(over.call)))
            self._clock.learn(over.cycles, over.begun.elapsed_time(over.spun) / 1e3)
            start, end = (self._origin_at + self._origin.elapsed_time(at) / 1e3 for at in (over.start, over.end))
            self._transfers.append(Transfer(over.call.op, over.call.payload, start, end, over.call.group))


class _Clock:
    """The rate at which `spin` counts, measured at first and again in each message.

    The fastest of the last ones counts, since a clock may rise from 345 MHz to 1980 under load, and another process's
    turn on the GPU makes a spin long, never short. The time of an event and a launch, as in a short spin, is taken off.
    """

    LONG, SHORT = 2_000_000, 200_000  # cycles: about 1 ms and 0.1 ms; a turn of another process takes a few of these
    TRIES, ROUNDS = 8, 20  # spins of each kind in a round; rounds at most
    LEAST = 1e-4  # seconds: in a shorter spin the half microsecond of an event's resolution counts

    def __init__(self) -> None:
        spin(10 * self.LONG)
        rate, self._overhead = self._measure()
        for _ in range(self.ROUNDS):
            before = rate
            rate, self._overhead = self._measure()
            if rate < 1.01 * before:  # it rises no more
                break
        self._rates = deque([rate], maxlen=16)  # cycles per second

    def _measure(self) -> tuple[float, float]:
        """Cycles per second, and the seconds that an event and a launch take."""
        short, long = self._fastest(self.SHORT), self._fastest(self.LONG)
        rate = (self.LONG - self.SHORT) / (long - short)
        return rate, max(0.0, short - self.SHORT / rate)

    def _fastest(self, cycles: int) -> float:  # seconds
        marks = [_event()]
        for _ in range(self.TRIES):
            spin(cycles)
            marks.append(_event())
        marks[-1].synchronize()
        fastest: float = min(before.elapsed_time(after) for before, after in pairwise(marks))  # milliseconds
        return fastest / 1e3

    def cycles(self, seconds: float) -> int:
        return int(seconds * max(self._rates))

    def learn(self, cycles: int, seconds: float) -> None:
        """Update the rate from a spin of `cycles` that took `seconds`."""
        if seconds >= self.LEAST:
            self._rates.append(cycles / (seconds - self._overhead))


def _event() -> Any:
    """A timed event, recorded on the current stream."""
    event = device.new_event(torch.device("cuda"))
    event.record()
    return event
