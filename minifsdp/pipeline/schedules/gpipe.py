"""GPipe: the batch is cut into micro-batches, so that ranks work at the same time (arXiv 1811.06965, figure 2).

    rank 0  0 1 2 3 . . . . . . 0 0 1 1 2 2 3 3     p = 4 stages, m = 4 micro-batches
    rank 1  . 0 1 2 3 . . . . 0 0 1 1 2 2 3 3 .     F takes one slot, B two
    rank 2  . . 0 1 2 3 . 0 0 1 1 2 2 3 3 . . .
    rank 3  . . . 0 1 2 3 0 0 1 1 2 2 3 3 . . .

All forwards come before all backwards. A rank is idle for (p - 1) F and (p - 1) B, a share of (p - 1) / (m + p - 1) of
the step, and holds the activations of all m micro-batches when the first backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action


def gpipe(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """The actions of `rank`, which has the stage of its number."""
    for micro in range(micros):
        yield Action(rank, "F", micro)
    for micro in range(micros):
        yield Action(rank, "B", micro)
