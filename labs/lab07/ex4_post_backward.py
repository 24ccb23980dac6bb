"""Exercise 7.4: Prefetch in the backward pass: POST."""

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

from .shared import (
    DEPTH,
    EACH_CALL,
    NO_DEPTH,
    NOTHING,
    OTHER_END,
    STATIC,
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
    "7.4",
    hints=(
        "Free, gather, reduce: freed first, so that no memory is added; reduced last, so that the gather does not "
        "stand behind the reduction.",
        "`schedule.free(unit)`; gather each of `order.ahead[::-1][:schedule.depth]`; `schedule.reduce(unit)`.",
    ),
    forbids=(PrefetchSchedule.post_backward, PrefetchSchedule.prefetch),
)
def post_backward(schedule: LabSchedule, unit: Unit) -> None:
    """When the gradients of `unit` are complete, free its parameters, gather the next units of backward, and reduce.

    Args:
        schedule: has `free(unit)`, `gather(unit)` and `reduce(unit)`, each of which issues its work and does not wait
            for it; `depth`, the number of entries of `ahead` to gather (None means all); and `order` with the list
            `ahead`: the units whose backward is still to come, the next one last.
        unit: the unit whose backward has just ended.

    Choose the order of the three so that nothing is gathered while `unit` is still unsharded, and so that no gather is
    queued behind this reduction.
    """
    schedule.free(unit)
    for following in schedule.order.ahead[::-1][: schedule.depth]:
        schedule.gather(following)
    schedule.reduce(unit)


POST_MISTAKES = {
    "free first: gathered before the free, the next unit is whole beside this one": in_turn(
        "ahead free reduce", to_come
    ),
    "the gather stands behind the reduction on the link, and the next unit waits for both: reduce last": in_turn(
        "free reduce ahead", to_come
    ),
    NOTHING: in_turn("free reduce", to_come),
    "the unit stays whole after its backward: free it": in_turn("ahead reduce", to_come),
    "the unit's gradient is never reduced": in_turn("free ahead", to_come),
    "what is gathered ahead is to arrive while others compute: do not wait for it here": in_turn(
        "free ahead wait-for-them reduce", to_come
    ),
    DEPTH: in_turn("free ahead reduce", one(to_come)),
    DEPTH + " (here: all, always)": in_turn("free ahead reduce", every(to_come)),
    NO_DEPTH: in_turn("free ahead reduce", or_all(to_come)),
    DEPTH + " (here: two at most)": in_turn("free ahead reduce", two_at_most(to_come)),
    EACH_CALL: in_turn("free ahead reduce", distinct(to_come)),
    OTHER_END: in_turn("free ahead reduce", other_end),
    STATIC: in_turn("free ahead reduce", as_recorded),
    "the reduction reads the gradient alone: free before it, or the parameters wait for the wire": in_turn(
        "reduce free ahead", to_come
    ),
}


@check("7.4")
def check_post_backward(answer, variant):
    """Freed, then the next gather, then the reduction: no byte more for one unit ahead."""
    compare_runs("post_backward", in_turn("free ahead reduce", to_come), answer, POST_MISTAKES)
    check_training(answer, variant, "post_backward", backward="post", backward_depth="depth")
