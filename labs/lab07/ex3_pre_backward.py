"""Exercise 7.3: Prefetch in the backward pass: PRE."""

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

from .shared import (
    AFTER_THE_WAIT,
    DEPTH,
    EACH_CALL,
    NO_DEPTH,
    NOTHING,
    OTHER_END,
    OWN_FIRST,
    STATIC,
    WAITS_FOR_ALL,
    LabSchedule,
    as_recorded,
    check_training,
    compare_runs,
    distinct,
    every,
    in_turn,
    one,
    or_all,
    other_end,
    to_come,
    two_at_most,
)


@reference(
    "7.3",
    hints=(
        "As in 7.2, with another list: `ahead` has those whose backward is to come, the next one at its end.",
        "Gather `unit`; gather each of `order.ahead[::-1][:schedule.depth]`; wait for `unit`.",
    ),
    forbids=(PrefetchSchedule.issue_backward, PrefetchSchedule.prefetch),
)
def pre_backward(schedule: LabSchedule, unit: Unit) -> None:
    """When the backward of `unit` begins, issue its gather, then the next units' gathers, and wait for its own only.

    Args:
        schedule: has `gather(unit)`; `depth`, the number of entries of `ahead` to gather (None means all); and `order`
            with the list `ahead`: the units whose backward is still to come, the next one last. `unit` is no longer in
            it.
        unit: has `wait_gather()`.

    `record` maintains `order.ahead`, so leave the list as it is.
    """
    schedule.gather(unit)
    for following in schedule.order.ahead[::-1][: schedule.depth]:
        schedule.gather(following)
    unit.wait_gather()


PRE_MISTAKES = {
    OWN_FIRST: in_turn("ahead own wait", to_come),
    AFTER_THE_WAIT: in_turn("own wait ahead", to_come),
    WAITS_FOR_ALL: in_turn("own ahead wait wait-for-them", to_come),
    NOTHING: in_turn("own wait", to_come),
    DEPTH: in_turn("own ahead wait", one(to_come)),
    DEPTH + " (here: all, always)": in_turn("own ahead wait", every(to_come)),
    NO_DEPTH: in_turn("own ahead wait", or_all(to_come)),
    DEPTH + " (here: two at most)": in_turn("own ahead wait", two_at_most(to_come)),
    EACH_CALL: in_turn("own ahead wait", distinct(to_come)),
    OTHER_END: in_turn("own ahead wait", other_end),
    STATIC: in_turn("own ahead wait", as_recorded),
}


@check("7.3")
def check_pre_backward(answer, variant):
    """The next units of backward are on the link before this one's gradients are computed: one unit more is whole."""
    compare_runs("pre_backward", in_turn("own ahead wait", to_come), answer, PRE_MISTAKES)
    check_training(answer, variant, "pre_backward", backward="pre", backward_depth="depth")
