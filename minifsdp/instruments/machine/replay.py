"""Run a recorded program on a simulated GPU. The results are modelled, not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from minifsdp.instruments.machine.allocator import CachingAllocator, DeviceMemoryError
from minifsdp.instruments.machine.blocks import Allocator, Block, Segment
from minifsdp.instruments.machine.hardware import Hardware
from minifsdp.instruments.machine.hazards import Hazard, Hazards
from minifsdp.instruments.machine.program import (
    COMPUTE,
    DEVICE,
    STEP,
    Allocate,
    Free,
    Instruction,
    Issue,
    Kernel,
    Mark,
    Program,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)
from minifsdp.instruments.machine.queues import LINK, Moment, Queues
from minifsdp.instruments.watch.storages import TAGS, Tag
from minifsdp.instruments.watch.timeline import Span, overlap

PAST = Moment(0.0, {})  # an event, or a collective's end, from before the recording


class Memory(NamedTuple):
    """Bytes at one time of the host.

    Attributes:
        at: seconds.
        allocated: bytes of blocks in use.
        active: bytes of blocks in use, and of freed blocks that a stream may still be using.
        reserved: bytes of all segments.
        fragmented: free bytes in segments with active blocks.
        requested: bytes that the program has requested, before rounding.
    """

    at: float
    allocated: int
    active: int
    reserved: int
    fragmented: int
    requested: int


class Moments(NamedTuple):
    """A mark: its name, the host's time, the time at which all earlier work is over, and the live bytes by tag."""

    name: str
    host: float
    done: float
    live: dict[Tag, int]


@dataclass
class Run:
    """A simulated run.

    Attributes:
        hardware: the simulated device.
        spans: the work and its times in seconds.
        memory: a sample after every allocation and free.
        marks: the program's marks.
        hazards: missing waits and blocks reused too early.
        retries: number of times that memory ran out (`num_alloc_retries`).
        retries_at: the host's time in seconds after each flush of the cache.
        snapshots: the allocator's segments at "peak of reserved", "first retry" (if there was one) and "end".
        done: the time in seconds at which all work is over.
    """

    hardware: Hardware
    spans: list[Span] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    marks: list[Moments] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    retries: int = 0
    retries_at: list[float] = field(default_factory=list)
    snapshots: dict[str, list[Segment]] = field(default_factory=dict)
    done: float = 0.0

    @property
    def steps(self) -> list[float]:
        """Seconds of each step, from the end of all earlier work to the end of its own."""
        ends = [mark.done for mark in self.marks if mark.name == STEP] + [self.done]
        return [after - before for before, after in pairwise(ends)]

    @property
    def seconds(self) -> float:
        """Seconds of the last step, when caches are warm.

        Raises:
            ValueError: the program has no steps.
        """
        if not self.steps:
            raise ValueError(f'the program has no mark "{STEP}": record it with record_steps, or mark its steps')
        return self.steps[-1]

    @property
    def overlap(self) -> float | None:
        """The fraction of communication that overlaps with compute."""
        return overlap(self.spans)

    def peak(self, what: str) -> int:
        """The peak of "allocated", "active", "reserved", "fragmented" or "requested", in bytes.

        Raises:
            ValueError: `what` is none of these.
        """
        if what not in Memory._fields[1:]:
            raise ValueError(f"no such count of bytes: {what}; choose from {', '.join(Memory._fields[1:])}")
        return max((int(getattr(sample, what)) for sample in self.memory), default=0)

    def last_step(self) -> list[Span]:
        """The spans of the last step, relative to its start and clipped there."""
        begin = self.done - self.seconds
        late = [span for span in self.spans if span.end > begin]
        return [Span(s.lane, s.name, max(0.0, s.start - begin), s.end - max(s.start, begin)) for s in late]


def replay(
    program: Program,
    hardware: Hardware,
    make_allocator: Callable[[int, Queues], Allocator] = CachingAllocator,
) -> Run:
    """Run a program on simulated hardware.

    Args:
        program: a `Recorder`'s program.
        hardware: the device.
        make_allocator: creates the allocator, given its capacity in bytes and its device.

    Raises:
        DeviceMemoryError: the program does not fit.
    """
    return _Replay(program, hardware, make_allocator).run()


class _Replay:
    def __init__(
        self, program: Program, hardware: Hardware, make_allocator: Callable[[int, Queues], Allocator]
    ) -> None:
        self.program, self.hardware = program, hardware
        self.queues = Queues(hardware)
        self.allocator = make_allocator(hardware.capacity, self.queues)
        self.hazards = Hazards()
        self.result = Run(hardware, self.queues.spans, hazards=self.hazards.found)
        self.blocks: dict[int, Block] = {}
        self.events: dict[int, Moment] = {}
        self.arrivals: dict[tuple[str, int], Moment] = {}  # by group and order of a collective
        self.live: dict[Tag, int] = dict.fromkeys(TAGS, 0)
        self.requested = 0

    def run(self) -> Run:
        for instruction in self.program.instructions:
            self.do(instruction)
        self.result.retries, self.result.done = self.allocator.retries, self.queues.done
        self.result.snapshots = {**self.allocator.snapshots, "end": self.allocator.snapshot()}
        return self.result

    def do(self, instruction: Instruction) -> None:
        queues = self.queues
        match instruction:
            case Kernel(name, unit, stream, reads, writes):
                clock = queues.kernel(unit, stream, self.hardware.kernel(instruction))
                self.hazards.used(name, stream, clock, reads, writes)
            case Allocate(buffer, stream):
                self.allocate(buffer, stream)
            case Free(buffer):
                self.free(buffer)
            case RecordStream(buffer, stream):
                self.allocator.record_stream(self.blocks[buffer], stream)
            case Issue(call, unit, stream, reads, writes):
                clock, arrival = queues.collective(call, unit, stream)
                self.arrivals[call.group, call.order] = arrival
                self.hazards.used(call.op, LINK, clock, reads, writes)
            case Wait(call, stream):
                queues.wait(stream, self.arrivals.get((call.group, call.order), PAST))
            case Record(event, stream):
                self.events[event] = queues.record(stream)
            case WaitEvent(event, stream):
                queues.wait(stream, self.events.get(event, PAST))
            case Synchronize(None):
                queues.synchronize(queues.record(COMPUTE))
            case Synchronize(int(event)):
                queues.synchronize(None if event == DEVICE else self.events.get(event, PAST))
            case Mark(name):
                self.result.marks.append(Moments(name, queues.host, queues.done, dict(self.live)))

    def allocate(self, buffer: int, stream: int) -> None:
        name, nbytes, tag, unit = self.program.buffers[buffer]
        before = self.allocator.retries
        try:
            block = self.blocks[buffer] = self.allocator.malloc(nbytes, stream)
        except DeviceMemoryError as error:
            cure = "give it more capacity, fewer samples, or a smaller limit"
            raise DeviceMemoryError(f"{name} does not fit on {self.hardware.name}: {error}; {cure}") from None
        self.result.retries_at += [self.queues.host] * (self.allocator.retries - before)
        self.hazards.allocated(buffer, name, unit, block)
        self.note(tag, nbytes)

    def free(self, buffer: int) -> None:
        _, nbytes, tag, _ = self.program.buffers[buffer]
        block, recorded = self.blocks.pop(buffer), len(self.queues.recorded)
        self.allocator.free(block)
        self.hazards.freed(buffer, block, self.queues.recorded[recorded:])
        self.note(tag, -nbytes)

    def note(self, tag: Tag, change: int) -> None:
        self.live[tag] += change
        self.requested += change
        at, held = self.queues.host, self.allocator
        self.result.memory.append(
            Memory(at, held.allocated, held.active, held.reserved, held.fragmented, self.requested)
        )
