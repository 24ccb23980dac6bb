"""The log of one step on one rank, and the steps of all ranks on one clock.

A step is taken twice: once with the ledger, which counts bytes and slows the host down, and once with the profiler,
which has the time. Both issue and await the same collectives in the same order: these moments tie bytes to times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from minifsdp import comm
from minifsdp.comm import Call
from minifsdp.instruments.explore.holdings import Holding, Holdings
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.storages import TAGS, Tag
from minifsdp.instruments.watch.timeline import Span

NO_HOLDINGS = Holdings([], list)


class Moment(NamedTuple):
    """A phase begins, or a collective was issued or has arrived.

    Attributes:
        at: seconds since 1970.
        name: such as "all_gather of blocks.1 (Block) issued".
        kind: the name without the collective's subject; two steps of one program have the same kinds.
        events: the number of the ledger's events before it.
        bytes: live bytes by tag; empty without a ledger.
    """

    at: float
    name: str
    kind: str
    events: int
    bytes: dict[Tag, int]


class Change(NamedTuple):
    """A row's new state.

    Attributes:
        at: seconds since 1970.
        events: the number of the ledger's events before it.
        row: the unit's place among the rows.
        held: what this rank holds of it from then on.
    """

    at: float
    events: int
    row: int
    held: Holding


@dataclass
class StepLog:
    """Log a step's moments, and what a rank holds of each unit, inside the `with`.

    Args:
        holdings: the rows to look at.
        ledger: counts the bytes; it must be counting, and have been reset. None: only moments are logged.

    Attributes:
        moments: in order; the last is the end.
        changes: in order; at first one for each row.
    """

    holdings: Holdings = NO_HOLDINGS
    ledger: Ledger | None = None
    moments: list[Moment] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._held: list[Holding | None] = [None] * len(self.holdings.names)
        self._look()
        if self.ledger is not None:
            self.ledger.listeners.append(self._look)
        comm.observers.append(self._around)
        return self

    def __exit__(self, *_: object) -> None:
        comm.observers.remove(self._around)
        if self.ledger is not None:
            self.ledger.listeners.remove(self._look)
        self.mark("end")

    def mark(self, name: str, kind: str | None = None) -> None:
        """Log a moment, such as the beginning of a phase."""
        self._look()
        live = self.ledger.live() if self.ledger is not None else {}
        self.moments.append(Moment(time.time(), name, kind or name, self._events(), live))

    @contextmanager
    def _around(self, call: Call, phase: Literal["issue", "wait"]) -> Iterator[None]:
        self._look()  # a unit says that its gather is on its way only after it has issued it
        yield
        done = "issued" if phase == "issue" else "arrived"
        subject = f" of {call.label.what}" if call.label is not None else ""
        self.mark(f"{call.op}{subject} {done}", f"{call.op} {done}")

    def _look(self) -> None:
        for row, held in enumerate(self.holdings.look()):
            if held != self._held[row]:
                self._held[row] = held
                self.changes.append(Change(time.time(), self._events(), row, held))

    def _events(self) -> int:
        return len(self.ledger.events) if self.ledger is not None else 0


@dataclass(frozen=True)
class LoggedStep:
    """A `StepLog` of a step with the ledger, ready for another process.

    Attributes:
        units: names of the rows.
        moments, changes: see there.
        start: live bytes by tag before the first event.
        events: (seconds since 1970, changes in bytes by tag).
    """

    units: list[str]
    moments: list[Moment]
    changes: list[Change]
    start: dict[Tag, int]
    events: list[tuple[float, dict[Tag, int]]]

    @classmethod
    def of(cls, log: StepLog) -> Self:
        assert log.ledger is not None, "only a ledger knows bytes"
        events = [(event.at / 1e6, event.changes) for event in log.ledger.events]
        end, changed = log.ledger.live(), [changes for _, changes in events]
        start = {tag: end[tag] - sum(changes.get(tag, 0) for changes in changed) for tag in TAGS}
        return cls(log.holdings.names, log.moments, log.changes, start, events)


def on_one_clock(logs: Sequence[LoggedStep], traced: Sequence[Moment], spans: Sequence[Span]) -> dict[str, Any]:
    """The step of all ranks, by the traced step's time, for the page.

    Args:
        logs: of each rank.
        traced: the moments of rank 0's step with the profiler.
        spans: its lanes.

    Returns:
        "length" of the step; "spans": [[lane, name, start, duration], ...]; "units"; and for each of "ranks", "start":
        [bytes of each tag], and "entries" in the order of the program: [time, name] is a moment, [time, None, row,
        parameters, gradient] a change of state, [time, place of a tag, change in bytes, ...] one of memory. Times are
        in microseconds.
    """
    lanes: list[list[Any]] = [
        [span.lane, span.name, round(1e6 * span.start), round(1e6 * span.duration)] for span in spans
    ]
    length = max([*(start + duration for _, _, start, duration in lanes), round(1e6 * (traced[-1].at - traced[0].at))])
    ranks = [{"start": [log.start[tag] for tag in TAGS], "entries": _entries(log, traced)} for log in logs]
    return {"length": length, "spans": lanes, "units": _units(logs), "ranks": ranks}


def _units(logs: Sequence[LoggedStep]) -> list[str]:
    """Names of the rows; in a pipeline a row is another unit on each rank."""
    rows = zip_longest(*(dict.fromkeys(tuple(log.units) for log in logs)), fillvalue="-")
    return [" | ".join(dict.fromkeys(names)) for names in rows]


def _entries(log: LoggedStep, traced: Sequence[Moment]) -> list[list[Any]]:
    """Events, moments and changes, merged; see `on_one_clock`."""
    found: list[tuple[tuple[int, float], float, list[Any]]] = []
    for place, (at, sizes) in enumerate(log.events, 1):
        found.append(((place, 0.0), at, [each for tag, size in sizes.items() for each in (TAGS.index(tag), size)]))
    found += [((moment.events, moment.at), moment.at, [moment.name]) for moment in log.moments]
    found += [((each.events, each.at), each.at, [None, each.row, *each.held]) for each in _without_gaps(log.changes)]
    found.sort(key=lambda each: each[0])
    times = np.maximum.accumulate(np.interp([at for _, at, _ in found], *_ties(log.moments, traced)))
    return [[round(1e6 * at), *entry] for at, (_, _, entry) in zip(times, found, strict=True) if entry]


def _ties(ours: Sequence[Moment], traced: Sequence[Moment]) -> tuple[list[float], list[float]]:
    """Seconds of one moment in both steps; only of phases that both have if the steps' collectives differ."""
    kinds, others = ([each.kind for each in moments] for moments in (ours, traced))
    if kinds == others:
        pairs = list(zip(ours, traced, strict=True))
    else:
        pairs = [
            (ours[i], traced[others.index(kind)]) for i, kind in enumerate(kinds) if " " not in kind and kind in others
        ]
    return [one.at for one, _ in pairs], [other.at - traced[0].at for _, other in pairs]


def _without_gaps(changes: Sequence[Change]) -> list[Change]:
    """A gradient is somewhere while a reduction takes it over: "none" between two other states is left out."""
    kept = []
    for place, change in enumerate(changes):
        later = [each for each in changes[place + 1 : place + 40] if each.row == change.row]
        goes_on = bool(later) and later[0].held[1] in ("on its way", "shard")
        if change.held[1] != "none" or not goes_on:
            kept.append(change)
    return kept
