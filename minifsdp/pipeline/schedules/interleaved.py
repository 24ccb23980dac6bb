"""Interleaved 1F1B: v stages on each rank, so that the bubble is a v-th as long (arXiv 2104.04473, section 2.2).

Stages on a rank are p apart, and a micro-batch passes every rank v times. A rank takes a round of micro-batches
through its first stage, the same ones through its second, and so on, then the next round; backwards in the same way,
from the last stage. The bubble is (p - 1) / (v m + p - 1) of the step; messages are v times as many.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifsdp.pipeline.actions import Action, Kind


def interleaved(rank: int, ranks: int, micros: int, per_rank: int) -> Iterator[Action]:
    """The actions of `rank`, which has stages `rank`, `rank + ranks`, ..., `per_rank` of them.

    Raises:
        ValueError: see `in_rounds`.
    """
    each, total = in_rounds(ranks, micros), micros * per_rank
    warm_up = min((per_rank - 1) * each + 2 * (ranks - 1 - rank), total)
    for n in range(warm_up):
        yield nth("F", n, rank, ranks, each, per_rank)
    for n in range(warm_up, total):
        yield nth("F", n, rank, ranks, each, per_rank)
        yield nth("B", n - warm_up, rank, ranks, each, per_rank)
    for n in range(total - warm_up, total):
        yield nth("B", n, rank, ranks, each, per_rank)


def in_rounds(ranks: int, micros: int) -> int:
    """The micro-batches of a round: as many as there are ranks, or a few more if that comes out even.

    Raises:
        ValueError: rounds would not be equally long.
    """
    rounds = max(1, micros // ranks)
    if micros % rounds:
        fitting = [n for n in range(1, 4 * micros) if n % max(1, n // ranks) == 0]
        nearest = sorted(fitting, key=lambda n: abs(n - micros))[:2]
        raise ValueError(
            f"{micros} micro-batches on {ranks} ranks make no {rounds} equal rounds: take "
            f"{' or '.join(str(n) for n in sorted(nearest))}"
        )
    return micros // rounds


def nth(kind: Kind, n: int, rank: int, ranks: int, each: int, per_rank: int) -> Action:
    """A rank's n-th forward or backward: `each` micro-batches through one of its stages, then through the next."""
    round_, within = divmod(n, each * per_rank)
    turn, micro = divmod(within, each)
    local = turn if kind == "F" else per_rank - 1 - turn
    return Action(local * ranks + rank, kind, round_ * each + micro)
