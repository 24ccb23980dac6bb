"""A simulated GPU's caching allocator, following torch's rules (c10/cuda/CUDACachingAllocator.cpp).

Slow driver calls get memory from the device in segments, which are cached: a freed block returns to the pool of its
stream and may serve that stream's next request at once, even with kernels still queued, since a stream runs them in
order. A use on another stream has to be recorded (`record_stream`): the block then becomes free only when that stream
has reached the point of the free.

    request    rounded up to 512 bytes
    small      up to 1 MiB: from segments of 2 MiB, split down to 512 bytes
    large      from segments of 20 MiB, or from 10 MiB on its own size rounded up to 2 MiB; what a split leaves over is
               kept if it is more than 1 MiB
    choice     the smallest free block of the same stream and kind that is large enough
    no memory  wait for the whole device, return every segment without a block in use, try once more

torch's opt-in features are left out: expandable segments, a largest size to split, rounding to fractions of powers of
two, memory pools and graphs. torch waits for the events of freed blocks first, and for the rest in `cudaFree`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any, Protocol

from minifsdp.instruments.machine.blocks import MIB, ROUND, SMALL, Block, Segment, rounded, segment_of, segment_size

MOST_RESERVED, FIRST_RETRY = "peak of reserved", "first retry"  # names of snapshots


class DeviceMemoryError(MemoryError):
    """The device has no room for a request, even after every unused segment was returned."""


class Queues(Protocol):
    """The device interface that the allocator needs. Streams are numbers; events are opaque."""

    def record(self, stream: int) -> Any:
        """An event after the work queued on a stream so far."""

    def happened(self, event: Any) -> bool:
        """True if the device has reached an event."""

    def synchronize(self) -> None:
        """Make the host wait until the device has finished all queued work."""

    def cuda_malloc(self, nbytes: int) -> None:
        """Spend the host's time for allocating a segment."""

    def cuda_free(self, nbytes: int) -> None: ...


class CachingAllocator:
    """Allocate blocks of a device's memory.

    Attributes:
        capacity: bytes of the device.
        allocated: bytes of blocks in use.
        active: bytes of blocks in use, and of freed blocks whose events have not happened.
        reserved: bytes of all segments; reserved bytes that are not active are cached.
        fragmented: cached bytes in segments with active blocks, which cannot be returned (`inactive_split_bytes`).
        retries: number of times that memory ran out and the cache was flushed (`num_alloc_retries`).
        snapshots: the segments at the peak of reserved memory and before the first retry.
    """

    def __init__(self, capacity: int, queues: Queues) -> None:
        self.capacity = capacity
        self.queues = queues
        self.allocated = self.active = self.reserved = self.fragmented = self.retries = 0
        self.snapshots: dict[str, list[Segment]] = {}
        self._most_reserved = 0
        self._heads: dict[int, Block] = {}  # the first block of every segment, by address
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}  # by size, then address
        self._waiting: dict[int, deque[tuple[Any, Block]]] = {}  # freed, with pending events, by the event's stream
        self._next_address = 0

    def malloc(self, nbytes: int, stream: int) -> Block:
        """Allocate a block of at least `nbytes` for a stream.

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
        """Free a block, immediately or once the streams recorded on it have reached this point.

        Raises:
            ValueError: the block is not in use.
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
        """Free the blocks whose events have happened."""
        for waiting in self._waiting.values():
            while waiting and self.queues.happened(waiting[0][0]):
                self._happened(waiting.popleft()[1])

    def snapshot(self) -> list[Segment]:
        """The current segments, in address order."""
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
        """Put a block into its pool, merged with its free neighbours."""
        self.active -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                self._merge(block, other)
        self._insert(block)

    def _merge(self, block: Block, other: Block) -> None:
        """Merge the neighbour `other` into `block`."""
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
        """Shrink `block` to `size`; the rest becomes free."""
        rest = Block(block.start + size, block.size - size, block.stream, block.small, None, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._insert(rest)

    def _insert(self, block: Block) -> None:
        """Insert a block into its pool."""
        insort(self._free.setdefault((block.stream, block.small), []), (block.size, block.start, block))
        self.fragmented += 0 if block.is_segment else block.size

    def _remove(self, block: Block) -> None:
        """Remove a block from its pool."""
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
        """Wait for the device, then return all segments without blocks in use."""
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
