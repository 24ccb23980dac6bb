"""Exercise 14.4: 1F1B: one forward, one backward."""

from minifsdp.course.workshop.checking import AnswerError, check
from minifsdp.course.workshop.references import reference
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.schedules import interleaved, zero_bubble
from minifsdp.pipeline.schedules import one_f_one_b as one_f_one_b_schedule

from .shared import SIZES, compare_lists, listed, pairs_after, right_gpipe, right_one_f_one_b


@reference(
    "14.4",
    hints=(
        "The last rank has its first gradient at once: F0 B0 F1 B1 and so on. The rank before it has time for one more "
        "forward pass until its first gradient comes back. How many does rank r have time for? What if there are fewer "
        "micro-batches than that?",
        "First `ahead = min(ranks - 1 - rank, micros)` forward passes; then pairs of F of `micro` and B of `micro - "
        "ahead`; then the remaining `ahead` backward passes.",
    ),
    forbids=(one_f_one_b_schedule.one_f_one_b, interleaved.interleaved, zero_bubble.zero_bubble),
)
def one_f_one_b(rank: int, ranks: int, micros: int) -> list[Action]:
    """Return the actions of a rank. The number of its only stage is that of the rank.

    Both the forward and the backward passes go from micro-batch 0 to the last.

    Args:
        rank: from 0.
        ranks: p.
        micros: m, which may be less than p.
    """
    ahead = min(ranks - 1 - rank, micros)
    found = [Action(rank, "F", micro) for micro in range(ahead)]
    for micro in range(ahead, micros):
        found += [Action(rank, "F", micro), Action(rank, "B", micro - ahead)]
    found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
    return found


def one_f_one_b_slips(rank, ranks, micros):
    ahead = ranks - 1 - rank
    right = pairs_after(rank, micros, ahead)
    return {
        "all forward passes first: this is GPipe": right_gpipe(rank, ranks, micros),
        "forward and backward passes in turn, without a warm-up: each waits for the full round trip": (
            pairs_after(rank, micros, 0)
        ),
        "the last rank needs no warm-up: count the ranks after this one, not those before it": pairs_after(
            rank, micros, rank
        ),
        "the warm-up has one forward pass too many: the pair itself begins with one": pairs_after(
            rank, micros, ahead + 1
        ),
        "the warm-up has one forward pass too few: the rank waits for the first gradient while it could go on": (
            pairs_after(rank, micros, ahead - 1)
        ),
        "every rank has the warm-up of the first, and holds as many micro-batches": pairs_after(
            rank, micros, ranks - 1
        ),
        "the gradient that comes back first is that of the oldest micro-batch, not of the newest": pairs_after(
            rank, micros, ahead, newest=True
        ),
        "in a pair, the forward pass comes first": pairs_after(rank, micros, ahead, backward_first=True),
        "a warm-up of two forward passes for each later rank is for interleaved stages": pairs_after(
            rank, micros, 2 * ahead
        ),
        "the remaining backward passes at the end are missing": right[: len(right) - min(ahead, micros)],
    }


@check("14.4")
def check_one_f_one_b(answer, variant):
    """Forwards ahead, one forward and one backward in turn, then the backwards that are left: as torch's list."""
    try:
        compare_lists(answer, variant, right_one_f_one_b, one_f_one_b_slips)
    except AnswerError as error:
        raise few_micro_batches(answer, error) from None


def few_micro_batches(answer, error):
    """The same error; if lists are right wherever m >= p, with the reason for that."""
    enough = [(ranks, micros) for ranks, micros in SIZES if micros >= ranks]
    if "likely slip" in str(error) and all(
        listed(answer, rank, ranks, micros) == right_one_f_one_b(rank, ranks, micros)
        for ranks, micros in enough
        for rank in range(ranks)
    ):
        first = str(error).splitlines()[0]
        return AnswerError(f"{first}\nlikely slip: there may be fewer micro-batches than ranks after this one")
    return error
