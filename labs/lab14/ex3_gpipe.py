"""Exercise 14.3: GPipe: all forwards, then all backwards."""

from minifsdp.course.workshop.checking import check
from minifsdp.course.workshop.references import reference
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedules import gpipe as gpipe_schedule

from .shared import backwards, compare_lists, forwards, right_gpipe, right_one_f_one_b


@reference(
    "14.3",
    hints=(
        "Each rank has one stage, and both have the same number. Which forward passes does the rank run, and when may "
        "its first backward pass start?",
        '`Action(rank, "F", micro)` for every micro-batch, then `Action(rank, "B", micro)` for every micro-batch.',
    ),
    forbids=(gpipe_schedule.gpipe,),
)
def gpipe(rank: int, ranks: int, micros: int) -> list[Action]:
    """Return the actions of a rank. The number of its only stage is that of the rank.

    Backward passes go from micro-batch 0 to the last, as in torch. (In the paper's figure, they start with the last.)

    Args:
        rank: from 0.
        ranks: p.
        micros: m.
    """
    return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]


def gpipe_slips(rank, ranks, micros):
    both = [Action(rank, kind, micro) for micro in range(micros) for kind in "FB"]
    later = backwards(rank, micros)
    return {
        "backward passes begin with micro-batch 0 here, as in torch: the other order works, too, but all ranks must "
        "agree": forwards(rank, micros) + later[::-1],
        "a backward pass after each forward pass: the next micro-batch waits, so only one is ever in progress": both,
        "a rank has one stage and all micro-batches: the two were swapped": [
            Action(micro, kind, rank) for kind in "FB" for micro in range(micros)
        ],
        "the backward pass cannot come before the forward pass": later + forwards(rank, micros),
        "a forward pass without a backward pass trains nothing": forwards(rank, micros),
        "this is 1F1B, the next exercise: here, all forward passes come first": right_one_f_one_b(rank, ranks, micros),
    }


@check("14.3")
def check_gpipe(answer, variant):
    """All forwards, then all backwards, on every rank."""
    compare_lists(answer, variant, right_gpipe, gpipe_slips)
