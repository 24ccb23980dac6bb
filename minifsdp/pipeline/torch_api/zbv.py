"""Zero bubble in a V: a rank's two stages are mirror images, so the last stage is where the first is (ZBV).

    stages of rank r: r and 2p - 1 - r

A micro-batch goes down the ranks and comes back up, and its gradients do the same: the rank that starts a step also
begins its backward, and no rank waits for the others at the end. With equal F, I and W there is no bubble once the
pipeline is full (2p - 1 micro-batches), and a rank holds at most as many activations as 1F1B's first
(arXiv 2401.10241, section 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import cast

from minifsdp.pipeline.actions import Action, Kind


def zbv(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """The actions of `rank`, which has stages `rank` and `2 * ranks - 1 - rank`."""
    full = max(2 * ranks - 1, micros)  # fewer leave gaps in the same order
    done: Counter[tuple[str, Kind]] = Counter()
    for half, kind in _order(rank, ranks, full, done):
        micro = done[half, kind]
        done[half, kind] += 1
        if micro < micros:
            yield Action(rank if half == "down" else 2 * ranks - 1 - rank, kind, micro)


def _order(rank: int, ranks: int, micros: int, done: Counter[tuple[str, Kind]]) -> Iterator[tuple[str, Kind]]:
    """The next half of the V, and the kind of action."""
    # Fill the pipeline: the way down, then both ways, then the first backwards.
    yield from _parse("down F", 2 * (ranks - rank) - 1)
    yield from _parse("up F, down F", rank)
    yield from _parse("up F, up I, up W", ranks - rank)
    # Steady state: one micro-batch down and up.
    while done["up", "F"] < micros:
        if done["down", "F"] < micros:
            yield "down", "F"
        yield from _parse("down I, down W, up F, up I, up W", 1)
    # Drain it: what other ranks wait for first.
    yield from _parse("down I, up I", rank)
    yield from _parse("down I, down W", ranks - rank)
    for half in ("up", "down"):
        while done[half, "W"] < micros:
            yield half, "W"


def _parse(text: str, times: int) -> list[tuple[str, Kind]]:
    return [cast(tuple[str, Kind], tuple(each.split())) for each in text.split(", ")] * times
