"""Host, streams, events and link of the paper GPU, in virtual time.

A stream runs what is queued on it one after the other. The host queues and goes on; it waits only where the program
says so. So the moment at which a piece of work ends is known when it is queued:

    start = the latest of: the host has queued it, the stream is free, what the stream was told to wait for is over

Beside the time runs a vector clock (as in torch/cuda/_sanitizer.py): what each stream, and the host, can be sure has
happened before. Two uses of memory of which neither is sure of the other are a race, however lucky the timing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from minifsdp.comm import Call
from minifsdp.course.machine.hardware import Hardware
from minifsdp.course.machine.program import COMPUTE
from minifsdp.course.watch.timeline import Span

LINK = -1  # a queue of its own: collectives run one at a time, on whichever stream they were issued

Clock = dict[int, int]
"""By queue, how many of its pieces of work are known to have happened before."""


@dataclass(eq=False, slots=True)
class Moment:
    """An event.

    Attributes:
        at: when it happens, in seconds.
        clock: what has happened by then.
        seen: whether the allocator has asked for it and found it in the past.
    """

    at: float
    clock: Clock
    seen: bool = False


class Queues:
    """The paper GPU's streams and the host before them.

    Attributes:
        host: where the host is, in seconds.
        spans: what ran when, on the lanes "compute", "communication" and "wait" (the host stands still).
        recorded: all events, in order.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.host = 0.0
        self.spans: list[Span] = []
        self.recorded: list[Moment] = []
        self._ends: defaultdict[int, float] = defaultdict(float)
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._known: Clock = {}  # to the host, and so to all that it queues from then on

    def kernel(self, name: str, stream: int, seconds: float) -> Clock:
        """Queue a kernel; returns its clock, in which it has happened itself."""
        if self.hardware.runs_ahead:
            self.host += self.hardware.launch
        clock = self._run(stream, max(self.host, self._ends[stream]), seconds)
        self._note("compute" if stream == COMPUTE else f"compute (stream {stream})", name, stream, seconds)
        if not self.hardware.runs_ahead:
            self.host = self._ends[stream]
            _merge(self._known, clock)
        return clock

    def collective(self, call: Call, name: str, stream: int) -> tuple[Clock, Moment]:
        """Queue a collective, to begin when its stream has come to it; returns its clock and the moment it ends."""
        self.host += self.hardware.issue
        seconds = self.hardware.message(call)
        self.wait(LINK, self._end(stream))
        clock = self._run(LINK, max(self.host, self._ends[LINK]), seconds)
        self._note("communication", f"{call.op} {name}", LINK, seconds)
        return clock, Moment(self._ends[LINK], clock)

    def wait(self, stream: int, event: Moment) -> None:
        """Let a stream wait for an event; where the host is the compute, it is the host that waits."""
        self._ends[stream] = max(self._ends[stream], event.at)
        _merge(self._clocks[stream], event.clock)
        if not self.hardware.runs_ahead and stream != LINK:
            self.synchronize(event)

    def record(self, stream: int) -> Moment:
        """The moment at which a stream has done all that is queued on it."""
        self.recorded.append(self._end(stream))
        return self.recorded[-1]

    def happened(self, event: Moment) -> bool:
        """True if the host, now, finds the event in the past.

        What is queued from now on comes after it, but by luck: only the block that waited for it may count on that.
        """
        event.seen = event.seen or event.at <= self.host
        return event.seen

    def synchronize(self, event: Moment | None = None) -> None:
        """Let the host wait for an event, or for all that is queued."""
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
        """The time in seconds at which everything in the queue will be over."""
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
