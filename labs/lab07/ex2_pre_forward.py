"""Exercise 7.2: Prefetch in the forward pass."""

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

from .shared import (
    AFTER_THE_WAIT,
    DEPTH,
    EACH_CALL,
    NO_DEPTH,
    OWN_FIRST,
    WAITS_FOR_ALL,
    LabSchedule,
    at_most,
    check_training,
    compare_runs,
    distinct,
    every,
    in_turn,
    one,
    or_all,
    two_at_most,
)


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
    """When a call of `unit` begins, issue its gather, then the next units' gathers, then wait for its gather only.

    Args:
        schedule: has `gather(unit)`; `depth`, the number of calls to gather ahead (two calls of one unit count as two;
            None means all); and `order` with the lists `forward` and `seen`. The last entry of `seen` is the current
            call.
        unit: has `wait_gather()`.

    The next units are those that follow in `order.forward`, provided that all calls seen so far are the recorded ones,
    in the same order. In the first iteration, `order.forward` is empty.
    """
    order = schedule.order
    here = len(order.seen)
    schedule.gather(unit)
    if order.forward[:here] == order.seen:
        for following in order.forward[here:][: schedule.depth]:
            schedule.gather(following)
    unit.wait_gather()


# An answer is steps in some order, with some units to gather ahead: the right ones, or those of a usual mistake.
def recorded(schedule, unit):
    """7.2's units: those that follow in the recorded order, if it has been kept to so far."""
    begun, order = schedule.order.seen, schedule.order.forward
    kept = len(begun) <= len(order) and all(a is b for a, b in zip(begun, order, strict=False))
    return at_most(schedule.depth, order[len(begun) :] if kept else [])


def as_built(schedule, unit):
    return at_most(schedule.depth, schedule.units[schedule.units.index(unit) + 1 :])


def kept_or_not(schedule, unit):
    return at_most(schedule.depth, schedule.order.forward[len(schedule.order.seen) :])


def last_kept(calls):
    """Compares so many calls, the last ones, with the recorded order."""

    def nexts(schedule, unit):
        begun, order = schedule.order.seen, schedule.order.forward
        alike = order[max(0, len(begun) - calls) : len(begun)] == begun[-calls:]
        return at_most(schedule.depth, order[len(begun) :] if alike else [])

    return nexts


def by_first_place(schedule, unit):
    order = schedule.order.forward
    return at_most(schedule.depth, order[order.index(unit) + 1 :] if unit in order else [])


def one_too_far(schedule, unit):
    order = schedule.order
    return at_most(schedule.depth, order.forward[len(order.seen) + 1 :] if recorded(schedule, unit) else [])


FORWARD_MISTAKES = {
    OWN_FIRST: in_turn("ahead own wait", recorded),
    AFTER_THE_WAIT: in_turn("own wait ahead", recorded),
    WAITS_FOR_ALL: in_turn("own ahead wait wait-for-them", recorded),
    "nothing is gathered ahead: forward's order is recorded, and says who comes next": in_turn("own wait", recorded),
    DEPTH: in_turn("own ahead wait", one(recorded)),
    DEPTH + " (here: all, always)": in_turn("own ahead wait", every(recorded)),
    NO_DEPTH: in_turn("own ahead wait", or_all(recorded)),
    DEPTH + " (here: two at most)": in_turn("own ahead wait", two_at_most(recorded)),
    "in the first iteration there is no order to follow: in which order units are built says nothing": in_turn(
        "own ahead wait", as_built
    ),
    "this forward has left the recorded order: what that says of the units to come is a guess, gather nothing": in_turn(
        "own ahead wait", kept_or_not
    ),
    "a forward may leave the order and come back to it: this call alone says little, compare all seen": in_turn(
        "own ahead wait", last_kept(1)
    ),
    "a forward may leave the order and come back to it: the last two calls say little, compare all seen": in_turn(
        "own ahead wait", last_kept(2)
    ),
    EACH_CALL: in_turn("own ahead wait", distinct(recorded)),
    "a unit that is called twice stands in the order twice: `len(order.seen)` says how far forward is": in_turn(
        "own ahead wait", by_first_place
    ),
    "off by one: `seen` has this unit already, so `forward[len(seen)]` is the next": in_turn(
        "own ahead wait", one_too_far
    ),
}


@check("7.2")
def check_pre_forward(answer, variant):
    """The unit's own gather, those ahead, the wait; nothing is gathered by an order that is not known or not kept."""
    compare_runs("pre_forward", in_turn("own ahead wait", recorded), answer, FORWARD_MISTAKES)
    check_training(answer, variant, "pre_forward", forward_depth="depth")
