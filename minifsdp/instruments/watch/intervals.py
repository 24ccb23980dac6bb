"""Union, difference and length of time intervals, as sorted lists of disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The parts of `intervals` outside all `holes`; both must be disjoint and in order."""
    left: list[Interval] = []
    waiting = deque(holes)
    for start, end in intervals:
        while waiting and waiting[0][0] < end:
            hole_start, hole_end = waiting[0]
            if start < hole_start:
                left.append((start, hole_start))
            start = max(start, hole_end)
            if end < hole_end:
                break  # this hole may extend into the next interval
            waiting.popleft()
        if start < end:
            left.append((start, end))
    return left


def meets(disjoint: list[Interval], start: float, end: float) -> bool:
    """True if the disjoint intervals overlap the time from `start` to `end`."""
    after = bisect_left(disjoint, (end, end))
    return after > 0 and disjoint[after - 1][1] > start


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
