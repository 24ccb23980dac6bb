"""Detect unordered uses of memory: a missing wait, or a block reused too early."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from minifsdp.instruments.machine.blocks import Block
from minifsdp.instruments.machine.program import COMPUTE
from minifsdp.instruments.machine.queues import LINK, Clock, Moment


class Use(NamedTuple):
    """One use of a buffer: its name, the operation, the queue, and the operation's number on that queue."""

    buffer: str
    what: str
    queue: int
    tick: int

    def before(self, clock: Clock) -> bool:
        """True if the use is known to be over for work with this clock."""
        return clock.get(self.queue, 0) >= self.tick

    def __str__(self) -> str:
        named = {LINK: "the link", COMPUTE: "the compute stream"}
        return f"{self.what} on {named.get(self.queue, f'stream {self.queue}')}"


LastUses = dict[int, Use]
"""The last use on each queue; all earlier ones are over when it is."""


class Hazard(NamedTuple):
    """Attributes:
    kind: "missing wait" or "reused too early".
    unit: the unit that the memory belongs to.
    text: one line: the buffer, the operations, and the missing ordering.
    """

    kind: str
    unit: str
    text: str


@dataclass(slots=True)
class History:
    """The uses of one buffer that the next use must follow."""

    name: str
    unit: str
    before: LastUses  # of the memory's previous buffers
    written: Use | None = None
    reads: LastUses = field(default_factory=dict)  # since it was written

    def uses(self) -> LastUses:
        return _last([*self.before.values(), *([self.written] if self.written else []), *self.reads.values()])


class Ghost(NamedTuple):
    """Freed memory, its last uses, and the events that must happen before the allocator may reuse it."""

    start: int
    end: int
    uses: LastUses
    events: Sequence[Moment]

    def left(self) -> list[Use]:
        """The uses that no observed event shows to be over."""
        clocks = [event.clock for event in self.events if event.seen]
        return [use for use in self.uses.values() if not any(map(use.before, clocks))]


class Hazards:
    """Track every use of every buffer.

    Attributes:
        found: the hazards, each once.
    """

    def __init__(self) -> None:
        self.found: list[Hazard] = []
        self._texts: set[str] = set()
        self._histories: dict[int, History] = {}
        self._ghosts: list[Ghost] = []  # by address; no two overlap

    def allocated(self, buffer: int, name: str, unit: str, block: Block) -> None:
        """Register a new buffer, in memory that other buffers may have used."""
        self._histories[buffer] = History(name, unit, self._take(block.start, block.start + block.size))

    def freed(self, buffer: int, block: Block, events: Sequence[Moment]) -> None:
        """Unregister a freed buffer; `events` are those that the allocator recorded at its free."""
        uses = self._histories.pop(buffer).uses()
        if uses:
            insort(self._ghosts, Ghost(block.start, block.start + block.size, uses, events), key=_start)

    def used(self, what: str, queue: int, clock: Clock, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Register the buffers that a kernel or collective with this clock reads and writes."""
        tick = clock[queue]
        for buffer in {*reads, *writes}:
            history = self._histories[buffer]
            use = Use(history.name, what, queue, tick)
            for old in history.before.values():
                if not old.before(clock):
                    text = f"{history.name}: {use} uses memory that was {old.buffer}, which {old} may still be using"
                    self._report("reused too early", history, text)
            if history.written and not history.written.before(clock):
                text = f"{history.name}: {use} uses what {history.written} writes, with no wait between them"
                self._report("missing wait", history, text)
            if buffer not in writes:
                history.reads[queue] = use
                continue
            for old in history.reads.values():
                if not old.before(clock):
                    text = f"{history.name}: {use} overwrites what {old} may still be reading"
                    self._report("missing wait", history, text)
            history.written, history.reads, history.before = use, {}, {}

    def _take(self, start: int, end: int) -> LastUses:
        """Remove and return the last uses of this memory."""
        first = bisect_right(self._ghosts, start, key=_start)
        if first and self._ghosts[first - 1].end > start:
            first -= 1
        last = bisect_left(self._ghosts, end, lo=first, key=_start)
        found = self._ghosts[first:last]
        before = [ghost._replace(end=start) for ghost in found[:1] if ghost.start < start]
        after = [ghost._replace(start=end) for ghost in found[-1:] if ghost.end > end]
        self._ghosts[first:last] = before + after
        return _last(use for ghost in found for use in ghost.left())

    def _report(self, kind: str, history: History, text: str) -> None:
        if text not in self._texts:
            self._texts.add(text)
            self.found.append(Hazard(kind, history.unit, text))


_start = attrgetter("start")


def _last(uses: Iterable[Use]) -> LastUses:
    """The last use on each queue."""
    last: LastUses = {}
    for use in uses:
        if use.queue not in last or last[use.queue].tick < use.tick:
            last[use.queue] = use
    return last
