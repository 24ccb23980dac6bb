"""Times as lists of disjoint intervals, in order: their union, their difference, their length."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The parts of `intervals` that lie in none of `holes`; both disjoint and in order."""
    left: list[Interval] = []
    waiting = deque(holes)
    for start, end in intervals:
        while waiting and waiting[0][0] < end:
            hole_start, hole_end = waiting[0]
            if start < hole_start:
                left.append((start, hole_start))
            start = max(start, hole_end)
            if end < hole_end:
                break  # this hole reaches into the next interval too
            waiting.popleft()
        if start < end:
            left.append((start, end))
    return left


def meets(disjoint: list[Interval], start: float, end: float) -> bool:
    """True if a union of intervals has anything in common with the time between `start` and `end`."""
    after = bisect_left(disjoint, (end, end))
    return after > 0 and disjoint[after - 1][1] > start


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
