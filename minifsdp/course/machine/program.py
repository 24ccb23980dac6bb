"""The host's requests to its device, in their order: the program that the paper GPU runs.

Streams, buffers and events are numbers; stream 0 is the compute stream. A buffer is memory from one allocation to its
free: a tensor that is freed and allocated again is two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from minifsdp.comm import Call
from minifsdp.course.watch.storages import Tag

COMPUTE = 0  # the stream that is there from the start
DEVICE = -1  # in place of an event: all that is queued
STEP = "step"  # the mark that begins a training step


class Buffer(NamedTuple):
    """Attributes:
    name: what messages call it, such as "block 2 parameters".
    nbytes: its size in bytes.
    tag: what it is for.
    unit: the FSDP unit that it belongs to, or at whose work it was made.
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
        name: of the operator.
        unit: the FSDP unit whose parameters were read last.
        stream: where it is queued.
        reads, writes: buffers.
        flops: floating-point operations of matrix products and attention; 0 for everything else.
        nbytes: bytes that it reads and writes.
        dtype_size: bytes of an element of its first output of floating-point numbers.
        seconds: what it took in the real run.
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
    """A collective; it begins when its stream has come to this point, and the link is free."""

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
    """The host waits: for an event; with None, for a value of the compute stream (`item()`); with DEVICE, for all."""

    event: int | None


class Mark(NamedTuple):
    """A moment with a name, such as a phase that begins."""

    name: str


Instruction = Allocate | Free | RecordStream | Kernel | Issue | Wait | Record | WaitEvent | Synchronize | Mark


@dataclass
class Program:
    """Instructions and the buffers they speak of.

    Attributes:
        instructions: what was asked, in order; what was alive before comes first, as allocations.
        buffers: by number.
    """

    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)

    def calls(self) -> list[Call]:
        """The collectives in order of issue."""
        return [each.call for each in self.instructions if isinstance(each, Issue)]

    def marked(self) -> Iterator[tuple[str, list[Instruction]]]:
        """Each mark's name with the instructions from it to the next."""
        part: list[Instruction] = []
        name = ""
        for each in [*self.instructions, Mark("")]:
            if not isinstance(each, Mark):
                part.append(each)
                continue
            if name:
                yield name, part
            name, part = each.name, []
