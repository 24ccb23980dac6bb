"""The caching allocator's memory: segments from the device, cut into blocks, and the sizes of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

MIB = 2**20
ROUND = 512  # bytes: every block is a multiple
SMALL = MIB  # requests up to this are small
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, SEGMENT_ROUND = 10 * MIB, 2 * MIB  # from this size on a request gets a segment of its own size, rounded


def rounded(nbytes: int) -> int:
    """Bytes of the block that serves a request."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """Bytes to ask of the device for a block of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


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
    def state(self) -> Literal["in use", "waiting", "free"]:
        """In use, freed and waiting for events, or free."""
        return "in use" if self.requested is not None else "waiting" if self.events else "free"

    @property
    def is_segment(self) -> bool:
        """True if it is the whole of its segment."""
        return self.before is None and self.after is None


class Segment(NamedTuple):
    """Memory from one call of the device's, to be looked at.

    Attributes:
        start: its address in bytes.
        size: bytes.
        stream, small: whose pool its blocks belong to.
        blocks: copies, from its start to its end.
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
    """An allocator as `replay` uses it; the attributes mean what `CachingAllocator`'s do, in bytes."""

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
