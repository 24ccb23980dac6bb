"""Looped, breadth first: all micro-batches through one stage before the next (arXiv 2211.05953).

Each rank has v stages that are p apart, so that a micro-batch passes every rank v times. The bubble is that of stages
a v-th as long. All micro-batches of a stage follow each other: a sharded data-parallel stage is gathered once and
reduced once. As in GPipe, all activations are held.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action


def looped_bfs(rank: int, ranks: int, micros: int, per_rank: int) -> Iterator[Action]:
    """The actions of `rank`, which has stages `rank`, `rank + ranks`, ..., `per_rank` of them."""
    stages = range(rank, ranks * per_rank, ranks)
    for stage in stages:
        for micro in range(micros):
            yield Action(stage, "F", micro)
    for stage in reversed(stages):
        for micro in reversed(range(micros)):
            yield Action(stage, "B", micro)
