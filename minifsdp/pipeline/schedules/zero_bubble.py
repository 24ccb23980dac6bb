"""Zero bubble: weight gradients fill the time in which 1F1B waits (arXiv 2401.10241, ZB-H1).

The previous stage waits only for the input gradient. So backward is done in two parts, I and W, and no rank waits
for a W. Rank r puts its W's off by r micro-batches: the first gradients reach rank 0 sooner, and the W's that are left
fill its last wait. With equal F, I and W the bubble is (p - 1)(F + I - W), a third of 1F1B's, and as many activations
are held. With v stages on each rank the order is that of interleaved 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedules.interleaved import in_rounds, nth


def zero_bubble(rank: int, ranks: int, micros: int, per_rank: int = 1) -> Iterator[Action]:
    """The actions of `rank`, which has stages `rank`, `rank + ranks`, ..., `per_rank` of them.

    Raises:
        ValueError: see `in_rounds`.
    """
    each, total = in_rounds(ranks, micros), micros * per_rank
    warm_up = min((per_rank - 1) * each + ranks - 1 - rank, total)
    for n in range(warm_up):
        yield nth("F", n, rank, ranks, each, per_rank)
    for n in range(total):
        if warm_up + n < total:
            yield nth("F", warm_up + n, rank, ranks, each, per_rank)
        gradient = nth("B", n, rank, ranks, each, per_rank)
        yield gradient._replace(kind="I")
        if n >= rank:
            yield nth("B", n - rank, rank, ranks, each, per_rank)._replace(kind="W")
    for n in range(max(0, total - rank), total):
        yield nth("B", n, rank, ranks, each, per_rank)._replace(kind="W")
