"""The program that the simulated GPU runs: a host's commands to its device, in order of issue.

Streams, buffers and events are numbers; stream 0 is the compute stream. A buffer is memory from one allocation to its
free: a tensor that is freed and allocated again has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from minifsdp.comm import Call
from minifsdp.instruments.watch.storages import Tag

COMPUTE = 0  # the default stream
DEVICE = -1  # instead of an event: all queued work
STEP = "step"  # the mark that begins a training step


class Buffer(NamedTuple):
    """Attributes:
    name: its name in messages, such as "block 2 parameters".
    nbytes: size in bytes.
    tag: its purpose.
    unit: the FSDP unit that it belongs to, or that was running when it was allocated.
    """

    name: str
    nbytes: int
    tag: Tag
    unit: str = ""


class Allocate(NamedTuple):
    buffer: int
    stream: int


class Free(NamedTuple):
    buffer: int


class RecordStream(NamedTuple):
    buffer: int
    stream: int


class Kernel(NamedTuple):
    """Computation.

    Attributes:
        name: the operator's name.
        unit: the FSDP unit whose parameters were read last; "optimizer" from that mark until it reads a unit's.
        stream: the stream that it is queued on.
        reads, writes: buffers.
        flops: floating-point operations of matrix products, convolutions and attention; 0 for other operators.
        nbytes: bytes read and written.
        dtype_size: element size in bytes of its first floating-point output.
        seconds: its duration in the real run.
    """

    name: str
    unit: str
    stream: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float
    nbytes: int
    dtype_size: int
    seconds: float


class Issue(NamedTuple):
    """A collective; it starts once its stream has reached this point and the link is free."""

    call: Call
    unit: str
    stream: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Wait(NamedTuple):
    """A stream waits for a collective."""

    call: Call
    stream: int


class Record(NamedTuple):
    event: int
    stream: int


class WaitEvent(NamedTuple):
    event: int
    stream: int


class Synchronize(NamedTuple):
    """The host waits for an event; with None, for the compute stream (`item()`); with DEVICE, for all queued work."""

    event: int | None


class Mark(NamedTuple):
    """A named moment, such as the start of a phase."""

    name: str


Instruction = Allocate | Free | RecordStream | Kernel | Issue | Wait | Record | WaitEvent | Synchronize | Mark


@dataclass
class Program:
    """Instructions and the buffers that they refer to.

    Attributes:
        instructions: in order of issue, after allocations of the buffers that were alive at the start.
        buffers: by number.
    """

    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)

    def calls(self) -> list[Call]:
        """The collectives, in order of issue."""
        return [each.call for each in self.instructions if isinstance(each, Issue)]

    def marked(self) -> Iterator[tuple[str, list[Instruction]]]:
        """Each mark's name, with the instructions up to the next mark."""
        part: list[Instruction] = []
        name = ""
        for each in [*self.instructions, Mark("")]:
            if not isinstance(each, Mark):
                part.append(each)
                continue
            if name:
                yield name, part
            name, part = each.name, []
