"""Blocks and segments: the caching allocator gets segments from the device and cuts them into blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

MIB = 2**20
ROUND = 512  # bytes: every block is a multiple
SMALL = MIB  # requests up to this are small
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, SEGMENT_ROUND = 10 * MIB, 2 * MIB  # requests from this size get a segment of their own rounded size


def rounded(nbytes: int) -> int:
    """Size in bytes of the block that serves a request."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """Size in bytes of the segment to allocate for a block of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        start: address in bytes; segments' addresses do not overlap.
        size: bytes.
        stream: the stream whose requests it serves.
        small: True for the stream's pool of small blocks, False for its pool of large ones.
        requested: bytes requested, while it is in use; None once it is freed.
        before, after: its neighbours in the segment.
        users: streams besides `stream` that have been recorded on it.
        events: number of events that must happen before it is free.
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
    def state(self) -> Literal["in use", "waiting", "free"]:
        """The state: in use, waiting for events after its free, or free."""
        return "in use" if self.requested is not None else "waiting" if self.events else "free"

    @property
    def is_segment(self) -> bool:
        """True if the block spans its whole segment."""
        return self.before is None and self.after is None


class Segment(NamedTuple):
    """A snapshot of the memory from one device allocation.

    Attributes:
        start: address in bytes.
        size: bytes.
        stream, small: the pool that its blocks belong to.
        blocks: copies of its blocks in address order.
    """

    start: int
    size: int
    stream: int
    small: bool
    blocks: list[Block]


def segment_of(head: Block) -> Segment:
    """The segment that begins with this block."""
    blocks: list[Block] = []
    block: Block | None = head
    while block is not None:
        blocks.append(Block(block.start, block.size, block.stream, block.small, block.requested, events=block.events))
        block = block.after
    return Segment(head.start, sum(each.size for each in blocks), head.stream, head.small, blocks)


class Allocator(Protocol):
    """The allocator interface that `replay` needs; the attributes are those of `CachingAllocator`."""

    @property
    def allocated(self) -> int: ...

    @property
    def active(self) -> int: ...

    @property
    def reserved(self) -> int: ...

    @property
    def fragmented(self) -> int: ...

    @property
    def retries(self) -> int: ...

    @property
    def snapshots(self) -> dict[str, list[Segment]]: ...

    def malloc(self, nbytes: int, stream: int) -> Block: ...

    def record_stream(self, block: Block, stream: int) -> None: ...

    def free(self, block: Block) -> None: ...

    def snapshot(self) -> list[Segment]: ...
