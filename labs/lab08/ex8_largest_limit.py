"""Exercise 8.8: Choose k."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


@reference(
    "8.8",
    hints=(
        "Go through backward: at the moment of block j the blocks j, j - 1, ... are whole, as many as the limit lets, "
        "and `held[j]` is there beside them. The heaviest moment has to fit. A larger k never needs less.",
        "`peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))` for each k from 1 "
        "to `len(blocks)`; the largest k with `peak <= budget`, and a ValueError if there is none.",
    ),
    forbids=(closed_form._window, closed_form._most_whole),
)
def largest_limit(budget: int, blocks: Sequence[int], held: Sequence[int]) -> int:
    """Return the largest limit k for which the peak of a step is at most `budget` bytes.

    Args:
        budget: the number of bytes available.
        blocks: the unsharded bytes of each block, in forward order; at least one.
        held: for each block, the bytes held in addition to gathered blocks when the block's gradient is complete.

    Returns:
        A limit from 1 to `len(blocks)`; a larger k changes nothing.

    Raises:
        ValueError: if not even k = 1 fits.
    """
    fits = 0
    for k in range(1, len(blocks) + 1):
        peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
        if peak <= budget:
            fits = k
    if not fits:
        raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
    return fits


@check("8.8")
def check_largest_limit(answer, variant):
    """The largest k whose heaviest moment fits, to the byte; a ValueError if not even one unit does."""
    generator = torch.Generator().manual_seed(80 + variant.seed)
    count = 5 + variant.size % 3
    cases: list[Case] = []
    for spread in (0, 60, 120, 400):
        blocks = [4 * int(x) for x in torch.randint(20, 400, (count,), generator=generator)]
        held = [4 * int(x) for x in torch.randint(800, 801 + spread, (count,), generator=generator)]
        peaks = [peak_with(k, blocks, held) for k in range(1, count + 1)]
        budgets = sorted({near for peak in peaks for near in (peak - 1, peak, peak + 1)} | {10**9})
        cases += [Case(budget, blocks, held, peaks) for budget in budgets]
    gib = 2**30
    large = [(3 * gib + 4, 3 * gib, 3 * gib, 3 * gib), (40 * gib, 40 * gib + 4, 40 * gib, 40 * gib)]
    for blocks, held in (large, ([12], [100]), ([5] * 12, [0] * 12)):
        peaks = [peak_with(k, blocks, held) for k in range(1, len(blocks) + 1)]
        cases += [Case(peak + near, list(blocks), list(held), peaks) for peak in peaks for near in (-1, 0, 1)]
    for blocks, held in (([10, 1, 1], [100, 0, 0]), ([10, 10, 10], [90, 91, 10])):  # the heaviest moment is early
        peaks = [peak_with(k, blocks, held) for k in (1, 2, 3)]
        cases += [Case(budget, blocks, held, peaks) for budget in range(min(peaks) - 14, max(peaks) + 2)]
    got = [limit_of(answer, case) for case in cases]
    wanted = [largest(case, lambda k, case=case: case.peaks[k - 1]) for case in cases]
    if got == [limit or "ValueError" for limit in wanted]:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != (b or "ValueError"))
    case, right = cases[at], wanted[at] or "ValueError"
    slip = why_limit([0 if limit == "ValueError" else limit for limit in got], wanted, cases)
    if case.budget > 2**30:
        slip = "bytes of a GPU need more than the 24 bits of float32 and the 32 of an int32: Python's int is exact"
    raise AnswerError(
        f"{case.budget:,} bytes, and peaks of {', '.join(f'{peak:,}' for peak in case.peaks)} with limits 1, 2, ...: "
        f"expected {right}, got {got[at]!r}" + (f"\nlikely slip: {slip}" if slip else "")
    )


class Case(NamedTuple):
    budget: int
    blocks: list[int]
    held: list[int]
    peaks: list[int]


def peak_with(k, blocks, held):
    """By a running sum, which is not how one would write it down."""
    totals = [0]
    for block in blocks:
        totals.append(totals[-1] + block)
    return max(held[j] + totals[j + 1] - totals[max(0, j + 1 - k)] for j in range(len(blocks)))


def limit_of(answer, case):
    blocks, held = list(case.blocks), list(case.held)
    try:
        limit = answer(case.budget, blocks, held)
    except ValueError:
        limit = "ValueError"
    slip = "the lists belong to the caller, who may need them again: use `reversed`, not `reverse`"
    expect("`blocks` and `held` afterwards", [blocks, held], [case.blocks, case.held], slip=slip)
    return limit


def largest(case, peak):
    """The largest k whose `peak(k)` fits; 0 if there is none."""
    return max([k for k in range(1, len(case.blocks) + 1) if peak(k) <= case.budget], default=0)


def why_limit(got, wanted, cases):
    """The slip that gives all of these limits."""

    def all_with(peak):
        return [largest(case, lambda k, case=case: peak(k, *case[1:3])) for case in cases]

    def runs(k, blocks):
        return [sum(blocks[i : i + k]) for i in range(len(blocks) - k + 1)]

    slips = {
        "at least one unit has to fit: raise ValueError if it does not": wanted,
        "the heaviest blocks are not unsharded at one time unless they are neighbours": all_with(
            lambda k, blocks, held: max(held) + sum(sorted(blocks)[-k:])
        ),
        "the largest `held` and the heaviest run of blocks belong to different moments: add what is there at one": (
            all_with(lambda k, blocks, held: max(held) + max(runs(k, blocks)))
        ),
        "backward goes towards block 0: next to block j, blocks j - 1, j - 2, ... are gathered ahead": all_with(
            lambda k, blocks, held: max(held[j] + sum(blocks[j : j + k]) for j in range(len(blocks)))
        ),
        "there is no block before block 0: a slice that begins below 0 is counted from the end, and is empty": all_with(
            lambda k, blocks, held: max(held[j] + sum(blocks[j - k + 1 : j + 1]) for j in range(len(blocks)))
        ),
        "near block 0 fewer than k blocks are unsharded, and these moments count too": all_with(
            lambda k, blocks, held: max(
                held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(k - 1, len(blocks))
            )
        ),
        "`held` has to fit as well": all_with(lambda k, blocks, held: max(runs(k, blocks))),
        "each block's moment counts, and the heaviest of them has to fit, not the last": all_with(
            lambda k, blocks, held: held[-1] + sum(blocks[-k:])
        ),
        "that is one more than fits": [
            min(len(case.blocks), w + (w > 0)) for w, case in zip(wanted, cases, strict=True)
        ],
        "exactly as many bytes as the budget are within it": all_with(lambda k, *sizes: peak_with(k, *sizes) + 1),
    }
    return next((text for text, limits in slips.items() if limits == got), None)
