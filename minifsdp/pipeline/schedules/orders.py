"""Orders by name, as lists of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minifsdp.pipeline.actions import Action, Plan
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble

Order = Callable[[int, int, int, int], Iterator[Action]]
"""From a rank, the number of ranks, of micro-batches and of stages on each rank to the rank's actions."""

ORDERS: dict[str, Order] = {
    "naive": lambda rank, ranks, micros, stages: naive(rank, ranks),
    "gpipe": lambda rank, ranks, micros, stages: gpipe(rank, ranks, micros),
    "1f1b": lambda rank, ranks, micros, stages: one_f_one_b(rank, ranks, micros),
    "interleaved": interleaved,
    "zb-h1": lambda rank, ranks, micros, stages: zero_bubble(rank, ranks, micros),
}


def action_lists(order: str, ranks: int, micros: int, stages: int) -> Plan:
    """The actions of each rank, by the name of their order.

    Args:
        order: of `ORDERS`.
        ranks: of the pipeline.
        micros: micro-batches.
        stages: on each rank.
    """
    return [list(ORDERS[order](rank, ranks, micros, stages)) for rank in range(ranks)]


def count_stages(actions: Plan) -> int:
    """The stages of all ranks."""
    return 1 + max(action.stage for of_rank in actions for action in of_rank)
