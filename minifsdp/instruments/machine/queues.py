"""Host, streams, events and link of the simulated GPU, in virtual time.

A stream runs its queued work in order. The host queues work and continues; it waits only where the program says so.
The end of a piece of work is therefore known as soon as it is queued:

    start = the latest of: the host has queued it, the stream is free, the events that the stream waits for are over

A vector clock (as in torch/cuda/_sanitizer.py) tracks the work that each stream, and the host, knows to be over. Two
uses of memory that the clocks do not order are a race, even if the timing happens to be right.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from minifsdp.comm import Call
from minifsdp.instruments.machine.hardware import Hardware
from minifsdp.instruments.machine.program import COMPUTE
from minifsdp.instruments.watch.timeline import Span

LINK = -1  # a separate queue: collectives run one at a time, whichever stream issued them

Clock = dict[int, int]
"""The number of operations known to be over, by queue."""


@dataclass(eq=False, slots=True)
class Moment:
    """An event.

    Attributes:
        at: its time in seconds.
        clock: the work over by then.
        seen: True once the allocator has queried it and found it in the past.
    """

    at: float
    clock: Clock
    seen: bool = False


class Queues:
    """The simulated GPU's streams and host.

    Attributes:
        host: the host's current time in seconds.
        spans: the work and its times, on the lanes "compute", "communication" and "wait" (the host is blocked).
        recorded: all events, in order.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.host = 0.0
        self.spans: list[Span] = []
        self.recorded: list[Moment] = []
        self._ends: defaultdict[int, float] = defaultdict(float)
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._known: Clock = {}  # to the host, and so to everything that it queues afterwards

    def kernel(self, name: str, stream: int, seconds: float) -> Clock:
        """Queue a kernel; returns its clock, which includes the kernel itself."""
        if self.hardware.runs_ahead:
            self.host += self.hardware.launch
        clock = self._run(stream, max(self.host, self._ends[stream]), seconds)
        self._note("compute" if stream == COMPUTE else f"compute (stream {stream})", name, stream, seconds)
        if not self.hardware.runs_ahead:
            self.host = self._ends[stream]
            _merge(self._known, clock)
        return clock

    def collective(self, call: Call, name: str, stream: int) -> tuple[Clock, Moment]:
        """Queue a collective, which starts when its stream reaches it; returns its clock and its end."""
        self.host += self.hardware.issue
        seconds = self.hardware.message(call)
        self.wait(LINK, self._end(stream))
        clock = self._run(LINK, max(self.host, self._ends[LINK]), seconds)
        self._note("communication", f"{call.op} {name}", LINK, seconds)
        return clock, Moment(self._ends[LINK], clock)

    def wait(self, stream: int, event: Moment) -> None:
        """Make a stream wait for an event; if the host computes, the host waits instead."""
        self._ends[stream] = max(self._ends[stream], event.at)
        _merge(self._clocks[stream], event.clock)
        if not self.hardware.runs_ahead and stream != LINK:
            self.synchronize(event)

    def record(self, stream: int) -> Moment:
        """Record an event after the work queued on a stream so far."""
        self.recorded.append(self._end(stream))
        return self.recorded[-1]

    def happened(self, event: Moment) -> bool:
        """True if the event is in the host's past.

        Work queued from now on happens to follow it, but only the block that waited for it may rely on that.
        """
        event.seen = event.seen or event.at <= self.host
        return event.seen

    def synchronize(self, event: Moment | None = None) -> None:
        """Make the host wait for an event, or for all queued work."""
        moments = [event] if event is not None else [self._end(stream) for stream in list(self._ends)]
        for moment in moments:
            _merge(self._known, moment.clock)
        until = max([self.host, *(moment.at for moment in moments)])
        if until > self.host:
            self.spans.append(Span("wait", "host waits", self.host, until - self.host))
        self.host = until

    def cuda_malloc(self, nbytes: int) -> None:
        self._driver("cudaMalloc", nbytes)

    def cuda_free(self, nbytes: int) -> None:
        self._driver("cudaFree", nbytes)

    @property
    def done(self) -> float:
        """The time at which all queued work is over, in seconds."""
        return max([self.host, *self._ends.values()])

    def _driver(self, name: str, nbytes: int) -> None:
        seconds = self.hardware.segment_seconds(nbytes)
        if seconds:
            self.spans.append(Span("wait", name, self.host, seconds))
        self.host += seconds

    def _end(self, stream: int) -> Moment:
        clock = dict(self._known)
        _merge(clock, self._clocks[stream])
        return Moment(max(self.host, self._ends[stream]), clock)

    def _run(self, queue: int, start: float, seconds: float) -> Clock:
        clock = self._clocks[queue]
        _merge(clock, self._known)
        clock[queue] = clock.get(queue, 0) + 1
        self._ends[queue] = start + seconds
        return dict(clock)

    def _note(self, lane: str, name: str, queue: int, seconds: float) -> None:
        self.spans.append(Span(lane, name, self._ends[queue] - seconds, seconds))


def _merge(clock: Clock, other: Clock) -> None:
    for queue, count in other.items():
        if clock.get(queue, 0) < count:
            clock[queue] = count
