"""The caching allocator of a GPU on paper, by the rules of torch's (c10/cuda/CUDACachingAllocator.cpp).

Memory comes from the device in segments, by calls that are slow, and is kept: a freed block goes back to the pool of
the stream it was allocated on, to be handed to that stream's next request, kernels still queued or not, since a stream
runs them in order. Another stream that uses the block has to be told of (`record_stream`): then the block comes back
only when that stream has reached the point of the free.

    request    rounded up to 512 bytes
    small      up to 1 MiB: from segments of 2 MiB, split down to 512 bytes
    large      from segments of 20 MiB, or from 10 MiB on its own size rounded up to 2 MiB; what a split leaves over is
               kept if it is more than 1 MiB
    choice     the smallest free block of the same stream and kind that is large enough
    no memory  wait for the whole device, give every segment without a block in use back to it, try once more

Of torch's, those rules are left out that are not in force unless asked for: expandable segments, a largest size to
split, rounding to parts of powers of two, memory pools and graphs. There the wait is for the events of freed blocks
first, and for the rest in `cudaFree`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any, Protocol

from minifsdp.course.machine.blocks import MIB, ROUND, SMALL, Block, Segment, rounded, segment_of, segment_size

MOST_RESERVED, FIRST_RETRY = "peak of reserved", "first retry"  # names of snapshots


class DeviceMemoryError(MemoryError):
    """The device has no room for a request, even with every unused segment given back."""


class Queues(Protocol):
    """The allocator's view of its device: streams are numbers, events anything."""

    def record(self, stream: int) -> Any:
        """An event at the end of what is queued on a stream."""

    def happened(self, event: Any) -> bool:
        """True if the device has come to an event."""

    def synchronize(self) -> None:
        """Let the host wait until the device has done all that is queued."""

    def cuda_malloc(self, nbytes: int) -> None:
        """The host's time for a segment."""

    def cuda_free(self, nbytes: int) -> None: ...


class CachingAllocator:
    """Hands out blocks of a device's memory.

    Attributes:
        capacity: bytes of the device.
        allocated: bytes of blocks in use.
        active: those, and the freed ones whose events have not happened.
        reserved: bytes of all segments. What is reserved and not active is cached.
        fragmented: of the cached bytes those beside blocks that are active, which cannot be given back
            (`inactive_split_bytes`).
        retries: how often memory had run out and the cache was given back (`num_alloc_retries`).
        snapshots: the segments at moments to look at: when the most was reserved, and before the first retry.
    """

    def __init__(self, capacity: int, queues: Queues) -> None:
        self.capacity = capacity
        self.queues = queues
        self.allocated = self.active = self.reserved = self.fragmented = self.retries = 0
        self.snapshots: dict[str, list[Segment]] = {}
        self._most_reserved = 0
        self._heads: dict[int, Block] = {}  # the first block of every segment, by address
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}  # by size, then address
        self._waiting: dict[int, deque[tuple[Any, Block]]] = {}  # freed, with the event to come, by its stream
        self._next_address = 0

    def malloc(self, nbytes: int, stream: int) -> Block:
        """A block of at least `nbytes` for a stream.

        Raises:
            DeviceMemoryError: there is no room.
        """
        self.collect()
        size = rounded(nbytes)
        block = self._take(size, stream) or self._new_segment(size, stream)
        if block is None:
            self.retries += 1
            self.snapshots.setdefault(FIRST_RETRY, self.snapshot())
            self._flush()
            block = self._new_segment(size, stream)
        if block is None:
            in_use, beside = self.allocated / MIB, (self.reserved - self.allocated) / MIB
            raise DeviceMemoryError(
                f"tried to allocate {nbytes / MIB:.1f} MiB: of {self.capacity / MIB:.1f} MiB {in_use:.1f} are "
                f"allocated and {beside:.1f} reserved beside them"
            )
        if block.size - size >= (ROUND if block.small else SMALL + 1):
            self._split(block, size)
        block.requested = nbytes
        self.allocated += block.size
        self.active += block.size
        if self.reserved > self._most_reserved:
            self._most_reserved = self.reserved
            self.snapshots[MOST_RESERVED] = self.snapshot()
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block."""
        if stream != block.stream:
            block.users.add(stream)

    def free(self, block: Block) -> None:
        """Take a block back: at once, or when the streams recorded on it have reached this point.

        Raises:
            ValueError: it is not in use.
        """
        if block.requested is None:
            raise ValueError(f"the block at address {block.start:,} is not in use: it was freed before")
        block.requested = None
        self.allocated -= block.size
        block.events = len(block.users)
        for stream in sorted(block.users):
            self._waiting.setdefault(stream, deque()).append((self.queues.record(stream), block))
        block.users.clear()
        if not block.events:
            self._put(block)

    def collect(self) -> None:
        """Take back what has waited for events that have happened."""
        for waiting in self._waiting.values():
            while waiting and self.queues.happened(waiting[0][0]):
                self._happened(waiting.popleft()[1])

    def snapshot(self) -> list[Segment]:
        """The segments as they are now, in order of their addresses."""
        return [segment_of(head) for _, head in sorted(self._heads.items())]

    def _take(self, size: int, stream: int) -> Block | None:
        pool = self._free.get((stream, size <= SMALL), [])
        at = bisect_left(pool, (size,))
        if at == len(pool):
            return None
        block = pool[at][-1]
        self._remove(block)
        return block

    def _put(self, block: Block) -> None:
        """Free, and one with its free neighbours."""
        self.active -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                self._merge(block, other)
        self._insert(block)

    def _merge(self, block: Block, other: Block) -> None:
        """`block` takes in the neighbour `other`."""
        if other is block.before:
            block.start, block.before = other.start, other.before
            if block.before is None:
                self._heads[block.start] = block
            else:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _split(self, block: Block, size: int) -> None:
        """Cut `block` down to `size`; the rest is free."""
        rest = Block(block.start + size, block.size - size, block.stream, block.small, None, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._insert(rest)

    def _insert(self, block: Block) -> None:
        """Into its pool."""
        insort(self._free.setdefault((block.stream, block.small), []), (block.size, block.start, block))
        self.fragmented += 0 if block.is_segment else block.size

    def _remove(self, block: Block) -> None:
        """Out of its pool."""
        pool = self._free[block.stream, block.small]
        del pool[bisect_left(pool, (block.size, block.start))]
        self.fragmented -= 0 if block.is_segment else block.size

    def _new_segment(self, size: int, stream: int) -> Block | None:
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            return None
        self.queues.cuda_malloc(wanted)
        self.reserved += wanted
        block = self._heads[self._next_address] = Block(self._next_address, wanted, stream, size <= SMALL)
        self._next_address += wanted
        return block

    def _flush(self) -> None:
        """Wait for the device, and give it back all segments of which nothing is in use."""
        self.queues.synchronize()
        for waiting in self._waiting.values():
            while waiting:
                self._happened(waiting.popleft()[1])
        for block in [block for pool in self._free.values() for *_, block in pool if block.is_segment]:
            self._remove(block)
            del self._heads[block.start]
            self.queues.cuda_free(block.size)
            self.reserved -= block.size

    def _happened(self, block: Block) -> None:
        block.events -= 1
        if not block.events:
            self._put(block)
