"""Uses of memory that nothing puts in order: a read without its wait, a block reused too early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minifsdp.course.machine.allocator import Block
from minifsdp.course.machine.queues import LINK, Clock


class Use(NamedTuple):
    """One use of a buffer: by what, where, and as which piece of work there."""

    what: str
    queue: int
    tick: int

    def before(self, clock: Clock) -> bool:
        """Whether work with this clock can be sure that the use is over."""
        return clock.get(self.queue, 0) >= self.tick

    def __str__(self) -> str:
        return f"{self.what} on {'the link' if self.queue == LINK else f'stream {self.queue}'}"


class Hazard(NamedTuple):
    """Attributes:
    kind: "missing wait" or "reused too early".
    unit: whose memory it is.
    text: one line: what, who, and what is missing.
    """

    kind: str
    unit: str
    text: str


@dataclass(slots=True)
class History:
    """The uses of one buffer that matter to the next."""

    name: str
    unit: str
    written: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)  # the last on each queue, since it was written
    before: list[tuple[str, Use]] = field(default_factory=list)  # of what had the memory before, with its name

    def uses(self) -> list[Use]:
        return [*([self.written] if self.written else []), *self.reads.values()]


class Hazards:
    """Follows every use of every buffer.

    Attributes:
        found: the hazards, each once.
    """

    def __init__(self) -> None:
        self.found: list[Hazard] = []
        self._histories: dict[int, History] = {}
        self._ghosts: list[tuple[int, int, History]] = []  # freed memory, by start and end, that other streams used

    def allocated(self, buffer: int, name: str, unit: str, block: Block) -> None:
        history = self._histories[buffer] = History(name, unit)
        start, end = block.start, block.start + block.size
        for ghost in [each for each in self._ghosts if each[0] < end and start < each[1]]:
            history.before += [(ghost[2].name, use) for use in ghost[2].uses()]
            if start <= ghost[0] and ghost[1] <= end:
                self._ghosts.remove(ghost)

    def freed(self, buffer: int, block: Block) -> None:
        history = self._histories.pop(buffer)
        if any(use.queue != block.stream for use in history.uses()):
            self._ghosts.append((block.start, block.start + block.size, history))

    def used(self, what: str, queue: int, clock: Clock, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """A kernel or collective with this clock reads and writes buffers."""
        use = Use(what, queue, clock[queue])
        for buffer in {*reads, *writes}:
            history = self._histories[buffer]
            if history.written and not history.written.before(clock):
                self._report(
                    "missing wait",
                    history,
                    f"{history.name}: {use} uses what {history.written} writes, unordered: wait",
                )
            for name, old in history.before:
                if not old.before(clock):
                    text = f"{history.name}: {use} overwrites memory that was {name}, which {old} may still be using"
                    self._report("reused too early", history, text)
        for buffer in writes:
            history = self._histories[buffer]
            for old in history.reads.values():
                if not old.before(clock):
                    text = f"{history.name}: {use} overwrites what {old} may still be reading"
                    self._report("missing wait", history, text)
            history.written, history.reads, history.before = use, {}, []
        for buffer in set(reads) - set(writes):
            self._histories[buffer].reads[queue] = use

    def _report(self, kind: str, history: History, text: str) -> None:
        if not any(hazard.text == text for hazard in self.found):
            self.found.append(Hazard(kind, history.unit, text))
