"""1F1B: a backward as soon as one is possible, so that fewer activations are held (arXiv 2006.09503, PipeDream-Flush).

A rank starts with as many forwards as there are stages after its own, which is when its first gradient comes back.
From then on it does one forward and one backward in turn, then the backwards that are left. The bubble is GPipe's:
only the order within a rank has changed. But the rank of stage s holds at most p - s micro-batches, however many
there are, instead of all m.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action


def one_f_one_b(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """The actions of `rank`, which has the stage of its number."""
    warm_up = min(ranks - 1 - rank, micros)
    for micro in range(warm_up):
        yield Action(rank, "F", micro)
    for micro in range(warm_up, micros):
        yield Action(rank, "F", micro)
        yield Action(rank, "B", micro - warm_up)
    for micro in range(micros - warm_up, micros):
        yield Action(rank, "B", micro)
