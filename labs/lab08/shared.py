"""What several exercises of lab 08 share."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from minifsdp.course.workshop.checking import AnswerError
from minifsdp.fsdp.unit import SHARDED

ROUND, SEGMENT = 512, 2 * 2**20  # bytes


class Event(Protocol):
    def query(self) -> bool: ...


class Device(Protocol):
    """The device under an allocator; the notebook defines the class."""

    def new_segment(self, nbytes: int) -> int | None: ...
    def give_back(self, start: int) -> None: ...
    def record(self, stream: int) -> Event: ...
    def synchronize(self) -> None: ...


@dataclass(eq=False)
class Block:
    """A piece of a segment, as in the notebook's set-up cell."""

    start: int
    size: int
    stream: int
    users: set[int] = field(default_factory=set)


@dataclass
class Memory:
    """An allocator's state, as in the notebook's set-up cell."""

    device: Device
    segments: dict[int, int] = field(default_factory=dict)
    free: list[Block] = field(default_factory=list)
    waiting: list[tuple[Block, list[Event]]] = field(default_factory=list)
    retries: int = 0


GAP = SEGMENT  # between segments, which never touch


class FakeEvent:
    """One that happens when it is told to."""

    def __init__(self, log, stream):
        self.log, self.stream, self.past, self.queries = log, stream, False, 0

    def query(self):
        self.queries += 1
        if self.queries > 100:
            raise AnswerError(
                "queries of one event: expected one for each call, got more than 100\n"
                "likely slip: polling an event until it has happened is waiting for it: query it once, and continue"
            )
        return self.past

    def synchronize(self):
        self.log.append("the host waits for an event")
        self.past = True

    wait = synchronize


class FakeDevice:
    """Memory for `room` bytes, and what it was asked for."""

    def __init__(self, room, idle=False):
        self.room, self.next, self.sizes, self.log, self.events = room, 0, {}, [], []
        self.idle = idle  # has done all that is queued

    def new_segment(self, nbytes):
        self.log.append(f"new segment of {nbytes:,}")
        if nbytes > self.room:
            return None
        start, self.next = self.next, self.next + nbytes + GAP
        self.sizes[start] = nbytes
        self.room -= nbytes
        return start

    def give_back(self, start):
        if start not in self.sizes:
            raise AnswerError(
                f"`give_back({start:,})`: expected the start of a segment, got an address that is none\n"
                "likely slip: a free block that is part of a segment cannot go back: some of the segment is in use"
            )
        self.log.append(f"give back {start:,}")
        self.room += self.sizes.pop(start)

    def record(self, stream):
        self.log.append(f"event on stream {stream}")
        self.events.append(FakeEvent(self.log, stream))
        self.events[-1].past = self.idle
        return self.events[-1]

    def synchronize(self):
        self.log.append("the host waits for the device")
        for event in self.events:
            event.past = True


def memory_of(room, *segments):
    """A memory whose segments are cut as said: for each segment, pairs of bytes and stream, or of bytes and None.

    Returns it and the blocks in use (those with None), in the order given.
    """
    memory = Memory(FakeDevice(room))
    used = []
    for pieces in segments:
        whole = sum(size for size, _ in pieces)
        stream = next((stream for _, stream in pieces if stream is not None), 0)
        memory.device.room += whole
        at = memory.device.new_segment(whole)
        memory.segments[at] = whole
        for size, free in pieces:
            block = Block(at, size, stream)
            (used if free is None else memory.free).append(block)
            at += size
    memory.device.log.clear()
    return memory, used


def place(block):
    """A block in plain numbers: start, bytes, stream."""
    if block is None:
        return None
    if not all(hasattr(block, name) for name in ("start", "size", "stream")):
        raise AnswerError(f"expected a Block or None, got an object of type {type(block).__name__}")
    return (block.start, block.size, block.stream)


def free_of(memory):
    return sorted(place(block) for block in memory.free)


def put_back_of(log):
    def put_back(memory, block):
        log.append(f"put back {block.start:,}")
        memory.free.append(block)

    return put_back


class FakeUnit:
    """As much of a unit as a limiter may look at."""

    device = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself

    def __init__(self, name, stays=False):
        self.name, self.state, self.freed_after_forward = name, SHARDED, not stays
        self.is_root = name == "root"
        self.reshard_after_forward = self.is_root or not stays
