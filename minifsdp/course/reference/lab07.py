"""Reference answers of lab 07, prefetch."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

Event = Literal["begin forward", "pre-forward", "post-forward", "pre-backward", "end backward"]


class Order(Protocol):
    """The order of units; the notebook defines the class."""

    forward: list[Any]
    seen: list[Any]
    ahead: list[Any]


class LabSchedule(Protocol):
    """The schedule interface that an answer may use; the notebook defines the class."""

    order: Order
    depth: int | None

    def gather(self, unit: Unit) -> None: ...
    def free(self, unit: Unit) -> None: ...
    def reduce(self, unit: Unit) -> None: ...


@reference(
    "7.1",
    hints=(
        "Five events, five cases. Three of them only clear or append. What backward has reached is found from the end "
        "of `ahead`: a unit that was called twice stands there twice, and its backward begins with the last call.",
        "`match event:`. Begin of forward: clear `seen` and `ahead`. Post-forward: append to `ahead`, but only if a "
        "backward follows. Pre-backward: if the unit is in `ahead`, pop from the end until it is the one popped. End "
        "of backward: `forward` takes a copy of `seen` unless it has something already; clear `ahead`.",
    ),
    forbids=(
        PrefetchSchedule.begin_forward,
        PrefetchSchedule.post_forward,
        PrefetchSchedule.issue_forward,
        PrefetchSchedule.issue_backward,
    ),
)
def record(order: Order, event: Event, unit: Unit | None = None, backward_follows: bool = False) -> None:
    """Keep `order` up to date: forward's order from the first iteration, `seen` and `ahead` in every one."""
    match event:
        case "begin forward":
            order.seen.clear()
            order.ahead.clear()
        case "pre-forward":
            order.seen.append(unit)
        case "post-forward" if backward_follows:
            order.ahead.append(unit)
        case "pre-backward" if unit in order.ahead:
            while order.ahead.pop() is not unit:
                pass
        case "end backward":
            order.forward = order.forward or list(order.seen)
            order.ahead.clear()


@reference(
    "7.2",
    hints=(
        "Three things in a row: this unit's gather, the gathers of those to come, the wait for this unit. Who comes "
        "next says `order.forward`, as long as this forward has gone the recorded way so far.",
        "`here = len(order.seen)`; the forward goes the recorded way if `order.forward[:here] == order.seen`; then "
        "`order.forward[here:][:schedule.depth]` are the next ones (a slice up to None is all).",
    ),
    forbids=(PrefetchSchedule.issue_forward, PrefetchSchedule.prefetch),
)
def pre_forward(schedule: LabSchedule, unit: Unit) -> None:
    """A unit's forward begins: gather it and those of the next `schedule.depth` calls, and wait for it alone."""
    order = schedule.order
    here = len(order.seen)
    schedule.gather(unit)
    if order.forward[:here] == order.seen:
        for following in order.forward[here:][: schedule.depth]:
            schedule.gather(following)
    unit.wait_gather()


@reference(
    "7.3",
    hints=(
        "As in 7.2, with another list: `ahead` has those whose backward is to come, the next one at its end.",
        "Gather `unit`; gather each of `order.ahead[::-1][:schedule.depth]`; wait for `unit`.",
    ),
    forbids=(PrefetchSchedule.issue_backward, PrefetchSchedule.prefetch),
)
def pre_backward(schedule: LabSchedule, unit: Unit) -> None:
    """A unit's backward begins: gather it and the next units of backward, and wait for it alone."""
    schedule.gather(unit)
    for following in schedule.order.ahead[::-1][: schedule.depth]:
        schedule.gather(following)
    unit.wait_gather()


@reference(
    "7.4",
    hints=(
        "Free, gather, reduce: freed first, so that no memory is added; reduced last, so that the gather does not "
        "stand behind the reduction.",
        "`schedule.free(unit)`; gather each of `order.ahead[::-1][:schedule.depth]`; `schedule.reduce(unit)`.",
    ),
    forbids=(PrefetchSchedule.post_backward, PrefetchSchedule.prefetch),
)
def post_backward(schedule: LabSchedule, unit: Unit) -> None:
    """A unit's gradients are complete: free its parameters, gather the next units of backward, reduce."""
    schedule.free(unit)
    for following in schedule.order.ahead[::-1][: schedule.depth]:
        schedule.gather(following)
    schedule.reduce(unit)


@reference(
    "7.5",
    hints=(
        "Every rank has to see every rank's number, or some would raise and some not. Numbers travel as any tensor "
        "does, on the device of the group.",
        "`comm.all_gather` of a tensor [1] with the number into one [N] of the same dtype, waited for; `.tolist()`; "
        "the first number that differs from rank 0's is the one to name.",
    ),
)
def check_order(number: int, names: list[str], group: Group, device: torch.device) -> None:
    """Raise on every rank unless all are about to gather the same unit.

    Raises:
        RuntimeError: names the first rank that differs from rank 0, and what the two are about to gather.
    """
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    expected, *others = numbers.tolist()
    for rank, found in enumerate(others, start=1):
        if found != expected:
            raise RuntimeError(
                f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
            )
