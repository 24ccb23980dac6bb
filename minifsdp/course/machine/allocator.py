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
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

KIB, MIB = 2**10, 2**20
ROUND = 512  # bytes: every block is a multiple
SMALL = MIB  # requests up to this are small
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, SEGMENT_ROUND = 10 * MIB, 2 * MIB  # from this size on a request gets a segment of its own size, rounded


class DeviceMemoryError(MemoryError):
    """The device has no room for a request, even with every unused segment given back."""


class Queues(Protocol):
    """What the allocator asks of its device: streams are numbers, events anything."""

    def record(self, stream: int) -> Any:
        """An event at the end of what is queued on a stream."""

    def happened(self, event: Any) -> bool:
        """Whether the device has come to an event."""

    def synchronize(self) -> None:
        """Let the host wait until the device has done all that is queued."""

    def cuda_malloc(self, nbytes: int) -> None:
        """The host's time for a segment."""

    def cuda_free(self, nbytes: int) -> None: ...


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        start: its address in bytes; every segment has addresses of its own.
        size: bytes.
        stream: the stream whose requests it serves.
        small: which of the stream's two pools it belongs to.
        requested: bytes asked for while it is in use; None while it is free.
        before, after: its neighbours in the segment.
        users: streams besides `stream` that have been recorded on it.
        events: how many events have to happen before it is free.
    """

    start: int
    size: int
    stream: int
    small: bool
    requested: int | None = None
    before: Block | None = None
    after: Block | None = None
    users: set[int] = field(default_factory=set)
    events: int = 0

    @property
    def is_free(self) -> bool:
        return self.requested is None and not self.events

    @property
    def is_segment(self) -> bool:
        """Whether it is the whole of its segment."""
        return self.before is None and self.after is None


def rounded(nbytes: int) -> int:
    """Bytes of the block that serves a request."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """Bytes to ask of the device for a block of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


class CachingAllocator:
    """Hands out blocks of a device's memory.

    Attributes:
        capacity: bytes of the device.
        allocated: bytes of blocks in use.
        active: those, and the freed ones whose events have not happened.
        reserved: bytes of all segments. What is reserved and not active is cached; in pieces, it is fragmented.
        retries: how often memory had run out and the cache was given back (`num_alloc_retries`).
    """

    def __init__(self, capacity: int, queues: Queues) -> None:
        self.capacity = capacity
        self.queues = queues
        self.allocated = self.active = self.reserved = self.retries = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}  # by size, then address
        self._waiting: deque[tuple[Any, Block]] = deque()  # freed, the event to come
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
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block."""
        if stream != block.stream:
            block.users.add(stream)

    def free(self, block: Block) -> None:
        """Take a block back: at once, or when the streams recorded on it have reached this point."""
        block.requested = None
        self.allocated -= block.size
        block.events = len(block.users)
        for stream in sorted(block.users):
            self._waiting.append((self.queues.record(stream), block))
        block.users.clear()
        if not block.events:
            self._put(block)

    def collect(self) -> None:
        """Take back what has waited for events that have happened."""
        for _ in range(len(self._waiting)):
            event, block = self._waiting.popleft()
            if self.queues.happened(event):
                self._happened(block)
            else:
                self._waiting.append((event, block))

    @property
    def cached(self) -> list[Block]:
        """The free blocks, in order of their addresses."""
        return sorted((block for pool in self._free.values() for *_, block in pool), key=lambda block: block.start)

    def _take(self, size: int, stream: int) -> Block | None:
        pool = self._free.get((stream, size <= SMALL), [])
        at = bisect_left(pool, (size,))
        return pool.pop(at)[-1] if at < len(pool) else None

    def _put(self, block: Block) -> None:
        """Free, and one with its free neighbours."""
        self.active -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._pool(other).remove((other.size, other.start, other))
                self._merge(block, other)
        insort(self._pool(block), (block.size, block.start, block))

    def _merge(self, block: Block, other: Block) -> None:
        """`block` takes in the neighbour `other`."""
        if other is block.before:
            block.start, block.before = other.start, other.before
            if block.before is not None:
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
        insort(self._pool(rest), (rest.size, rest.start, rest))

    def _pool(self, block: Block) -> list[tuple[int, int, Block]]:
        return self._free.setdefault((block.stream, block.small), [])

    def _new_segment(self, size: int, stream: int) -> Block | None:
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            return None
        self.queues.cuda_malloc(wanted)
        self.reserved += wanted
        block = Block(self._next_address, wanted, stream, size <= SMALL)
        self._next_address += wanted
        return block

    def _flush(self) -> None:
        """Wait for the device, and give it back all segments of which nothing is in use."""
        self.queues.synchronize()
        while self._waiting:
            self._happened(self._waiting.popleft()[1])
        for key, pool in self._free.items():
            for _, _, block in pool:
                if block.is_segment:
                    self.queues.cuda_free(block.size)
                    self.reserved -= block.size
            self._free[key] = [entry for entry in pool if not entry[-1].is_segment]

    def _happened(self, block: Block) -> None:
        block.events -= 1
        if not block.events:
            self._put(block)
