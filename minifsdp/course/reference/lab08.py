"""Reference answers of lab 08, the rate limiter and the caching allocator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minifsdp import device
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.unit import SHARDED, Unit
from minifsdp.instruments.machine.allocator import CachingAllocator

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


@reference(
    "8.1",
    hints=(
        "Three questions in turn: which free blocks may serve this stream and are large enough, and which of them is "
        "the smallest? If none: does the device have a segment? Then: is something left over?",
        "`size = -(-nbytes // ROUND) * ROUND`; `min(fitting, key=lambda block: block.size)` if there are any, and off "
        "`memory.free` with it; else `memory.device.new_segment(...)`, entered in `memory.segments`, a `Block` over "
        "all of it. To split: `Block(block.start + size, block.size - size, stream)` goes on "
        "`memory.free`, then `block.size = size`.",
    ),
    forbids=(CachingAllocator.malloc, CachingAllocator._take, CachingAllocator._split, CachingAllocator._new_segment),
)
def malloc(memory: Memory, nbytes: int, stream: int) -> Block | None:
    """A block of at least `nbytes` bytes for a stream, or None if neither the cache nor the device has room."""
    size = -(-nbytes // ROUND) * ROUND
    fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
    if fitting:
        block = min(fitting, key=lambda each: each.size)
        memory.free.remove(block)
    else:
        whole = -(-size // SEGMENT) * SEGMENT
        start = memory.device.new_segment(whole)
        if start is None:
            return None
        memory.segments[start] = whole
        block = Block(start, whole, stream)
    if block.size > size:
        memory.free.append(Block(block.start + size, block.size - size, stream))
        block.size = size
    return block


@reference(
    "8.2",
    hints=(
        "Segments never touch, so of two free blocks of which one ends where the other begins both are of one segment. "
        "There can be one on either side.",
        "For each of `list(memory.free)`: if `other.start + other.size == block.start` or "
        "`block.start + block.size == other.start`, remove `other` from `memory.free`, set `block.start` to the "
        "smaller start and add its size. Then append the block.",
    ),
    forbids=(CachingAllocator._put, CachingAllocator._merge),
)
def put_back(memory: Memory, block: Block) -> None:
    """Put a block on `memory.free`, made one with the free blocks before and after it."""
    for other in list(memory.free):
        if other.start + other.size == block.start or block.start + block.size == other.start:
            memory.free.remove(other)
            block.start = min(block.start, other.start)
            block.size += other.size
    memory.free.append(block)


@reference(
    "8.3",
    hints=(
        "If only its own stream has used the block, its next user stands behind the last one in the same queue: it can "
        "go back at once. What another stream has queued up to now may still read it.",
        "For every stream in `block.users` an event, `memory.device.record(stream)`, now; the block and the list of "
        "them go on `memory.waiting`, and `block.users` is emptied. With no users: `put_back(memory, block)`.",
    ),
    forbids=(CachingAllocator.free,),
)
def release(memory: Memory, block: Block, put_back: Callable[[Memory, Block], None]) -> None:
    """Free a block: at once, or once all other streams that use it have come to this point."""
    if block.users:
        memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
        block.users.clear()
    else:
        put_back(memory, block)


@reference(
    "8.4",
    hints=(
        "An event answers `query()` at once, True or False. A block can come back if all of its events answer True, "
        "and where it stands in the list does not matter.",
        "Go over a copy of `memory.waiting`; where `all(event.query() for event in events)`, remove the entry and "
        "`put_back(memory, block)`.",
    ),
    forbids=(CachingAllocator.collect, CachingAllocator._happened),
)
def collect(memory: Memory, put_back: Callable[[Memory, Block], None]) -> None:
    """Take back the waiting blocks whose events have all happened; the host does not wait for any."""
    for entry in list(memory.waiting):
        block, events = entry
        if all(event.query() for event in events):
            memory.waiting.remove(entry)
            put_back(memory, block)


@reference(
    "8.5",
    hints=(
        "After `memory.device.synchronize()` every event has happened, so all that waits can come back; only then do "
        "you know which segments are free from end to end.",
        "On None: count, synchronize, put back and empty `memory.waiting`; for each free block with "
        "`memory.segments.get(block.start) == block.size`: off `memory.free`, out of `memory.segments`, "
        "`memory.device.give_back(block.start)`. Then `malloc` once more, and MemoryError if that gives None.",
    ),
    forbids=(CachingAllocator._flush,),
)
def malloc_or_retry(
    memory: Memory,
    nbytes: int,
    stream: int,
    malloc: Callable[[Memory, int, int], Block | None],
    put_back: Callable[[Memory, Block], None],
) -> Block:
    """`malloc`; if there is no room, give back to the device what is free and try once more."""
    block = malloc(memory, nbytes, stream)
    if block is None:
        memory.retries += 1
        memory.device.synchronize()
        while memory.waiting:
            put_back(memory, memory.waiting.pop()[0])
        for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
            memory.free.remove(free)
            del memory.segments[free.start]
            memory.device.give_back(free.start)
        block = malloc(memory, nbytes, stream)
    if block is None:
        raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
    return block


@reference(
    "8.6",
    hints=(
        "The schedule calls both functions more often than something happens: `gather` of what is gathered already, "
        "`free` of what is sharded. And of units that are not freed after forward no free will come.",
        "Keep a `deque` in the outer function. Where a unit is SHARDED and `unit.freed_after_forward`: "
        "`while len(frees) >= limit: frees.popleft().synchronize()`, then `gather(unit)`. In the other, look at the "
        "state before `free(unit)`, and afterwards append `device.current_stream(unit.device).record_event()`.",
    ),
    forbids=(RateLimitedSchedule.gather, RateLimitedSchedule.release),
)
def rate_limit(
    gather: Callable[[Unit], None], free: Callable[[Unit], None], limit: int
) -> tuple[Callable[[Unit], None], Callable[[Unit], None]]:
    """Two functions to be called in place of `gather` and `free`, which hold the host back; they share one queue."""
    frees: deque[Any] = deque()

    def limited_gather(unit: Unit) -> None:
        if unit.state is SHARDED and unit.freed_after_forward:
            while len(frees) >= limit:
                frees.popleft().synchronize()
        gather(unit)

    def limited_free(unit: Unit) -> None:
        counts = unit.state is not SHARDED and unit.freed_after_forward
        free(unit)
        if counts:
            frees.append(device.current_stream(unit.device).record_event())

    return limited_gather, limited_free


@reference(
    "8.7",
    hints=(
        "The order is that of use: what is needed first is gathered first, and what has no room now waits for its turn "
        "behind it. `gather` makes `whole` longer.",
        "`waiting = [unit for unit in units if unit.state is SHARDED]`; while there are any and `len(whole) < limit`: "
        "`gather(waiting.pop(0))`; return `waiting`.",
    ),
    forbids=(RateLimitedSchedule.prefetch,),
)
def prefetch_within(limit: int, whole: list[Unit], units: Sequence[Unit], gather: Callable[[Unit], None]) -> list[Unit]:
    """Gather `units` in their order while fewer than `limit` are whole; returns those that are put off."""
    waiting = [unit for unit in units if unit.state is SHARDED]
    while waiting and len(whole) < limit:
        gather(waiting.pop(0))
    return waiting


@reference(
    "8.8",
    hints=(
        "Go through backward: at the moment of block j the blocks j, j - 1, ... are whole, as many as the limit lets, "
        "and `held[j]` is there beside them. The heaviest moment has to fit. A larger k never needs less.",
        "`peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))` for each k from 1 "
        "to `len(blocks)`; the largest k with `peak <= budget`, and a ValueError if there is none.",
    ),
    forbids=(closed_form._window, closed_form._most_whole),
)
def largest_limit(budget: int, blocks: Sequence[int], held: Sequence[int]) -> int:
    """The largest limit k with which a step stays within `budget` bytes."""
    fits = 0
    for k in range(1, len(blocks) + 1):
        peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
        if peak <= budget:
            fits = k
    if not fits:
        raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
    return fits
