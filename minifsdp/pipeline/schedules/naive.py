"""Model parallelism without micro-batches: one rank computes, the others wait for it.

    rank 0  F . . . . . . B
    rank 1  . F . . . . B .
    rank 2  . . F . . B . .
    rank 3  . . . F B . . .

The whole batch goes through the stages and back. Of p ranks p - 1 are idle at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action


def naive(rank: int, ranks: int) -> Iterator[Action]:
    """The actions of `rank`, which has the stage of its number."""
    yield Action(rank, "F", 0)
    yield Action(rank, "B", 0)
