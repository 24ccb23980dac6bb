"""Exercise 14.1: Place the layers."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise
from random import Random

import torch

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference

from .shared import made_everywhere, randn


@reference(
    "14.1",
    hints=(
        "Suppose that the last stage begins at layer i. The rest is the same question with fewer layers and "
        "one rank less. A stage is never empty.",
        "`best(end, stages)`: the slowest stage and the counts for the first `end` layers on `stages` ranks. With one "
        "stage it is their sum. Otherwise take the minimum, over all beginnings of the last stage, of the larger of "
        "`best(begin, stages - 1)` and the sum of the layers from `begin` to `end`. `@cache` makes it fast.",
    ),
)
def place(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the number of consecutive layers on each rank for which the slowest stage is as fast as possible.

    If several placements are equally good, any of them will do.

    Args:
        costs: the time of each layer, in order, at least 0. There are at least as many layers as ranks. Do not change
            the list.
        ranks: p.

    Returns:
        p numbers, each at least 1, whose sum is the number of layers.
    """

    @cache
    def best(end: int, stages: int) -> tuple[float, list[int]]:
        if stages == 1:
            return sum(costs[:end]), [end]
        found = []
        for begin in range(stages - 1, end):
            slowest, counts = best(begin, stages - 1)
            found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
        return min(found)

    return best(len(costs), ranks)[1]


def slowest(costs, counts):
    return max(stages(costs, counts))


def all_counts(layers, ranks):
    for cuts in combinations(range(1, layers), ranks - 1):
        yield [end - begin for begin, end in zip((0, *cuts), (*cuts, layers), strict=True)]


def best_counts(costs, ranks, worse=slowest):
    return min(all_counts(len(costs), ranks), key=lambda counts: (worse(costs, counts), counts))


def stages(costs, counts):
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    return [sum(costs[begin : begin + count]) for begin, count in zip(begins, counts, strict=True)]


def squares(costs, counts):
    return sum(each**2 for each in stages(costs, counts))


def spread(costs, counts):
    return max(stages(costs, counts)) - min(stages(costs, counts))


def by_number(costs, ranks):
    """As many layers for each rank; the first ones one more."""
    return [len(part) for part in torch.arange(len(costs)).tensor_split(ranks)]


def until_average(costs, ranks):
    """Stages that are closed as soon as they have reached the average; the last one has the rest."""
    return filled_in_turn(costs, ranks, lambda filled, cost: filled >= sum(costs) / ranks)


def within_average(costs, ranks):
    """Stages that are closed before they pass the average; the last one has the rest."""
    return filled_in_turn(costs, ranks, lambda filled, cost: filled + cost > sum(costs) / ranks)


def filled_in_turn(costs, ranks, is_full):
    counts, filled = [0], 0.0
    for cost in costs:
        if counts[-1] and is_full(filled, cost) and len(counts) < ranks:
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += cost
    return counts


def rest_to_the_last(costs, ranks):
    each = len(costs) // ranks
    return [each] * (ranks - 1) + [len(costs) - each * (ranks - 1)]


def at_shares(costs, ranks):
    """Cuts where the sum of the costs passes a multiple of the average."""
    counts = [0] * ranks
    passed = 0.0
    for cost in costs:
        counts[min(ranks - 1, int(passed * ranks / (sum(costs) or 1)))] += 1
        passed += cost
    return counts


def nearest_to_shares(costs, ranks):
    """Cuts where the sum of the costs is nearest to a multiple of the average."""
    sums, cuts = [0, *accumulate(costs)], [0]
    for rank in range(1, ranks):
        options = range(cuts[-1] + 1, len(costs) - (ranks - rank) + 1)
        cuts.append(min(options, key=lambda at: abs(sums[at] - sums[-1] * rank / ranks)))
    return [end - begin for begin, end in pairwise([*cuts, len(costs)])]


def halves(costs, ranks):
    """The list cut in two as equally as possible, and each part again."""
    if ranks == 1:
        return [len(costs)]
    left = ranks // 2
    options = range(left, len(costs) - (ranks - left) + 1)
    cut = min(options, key=lambda at: abs(sum(costs[:at]) - sum(costs) * left / ranks))
    return halves(costs[:cut], left) + halves(costs[cut:], ranks - left)


PLACED = [
    ([4, 5, 9, 1, 1], 3),
    ([0.5, 1, 1, 1, 1, 1, 1, 2.5], 4),  # embedding, blocks and a head
    ([1] * 8, 4),
    ([1] * 7, 3),
    ([1] * 6, 3),
    ([0, 2, 0, 3, 0, 0], 2),
    ([0.4, 0.3, 2.5, 3, 3], 2),
    ([1.6, 0.8, 2, 0.1, 2.1], 2),
    ([0.34, 0.43, 0.16, 0.12], 2),
    ([0.055, 0.05, 0.019, 0.012, 0.025, 0.015], 3),  # seconds
    ([9, 1, 1, 1], 2),
    ([1, 1, 1, 9], 3),
    ([1, 9, 1, 9, 1], 3),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4),
    ([4, 4, 4, 4, 6, 6], 3),
    ([5, 2, 3], 3),
    ([7], 1),
    ([3, 1, 0, 1, 3, 1, 2], 5),
    ([0, 1, 3, 1, 2, 1, 2], 4),
]


def drawn_costs(seed):
    """Small lists of every length, for every number of ranks: whole numbers, fractions, microseconds and millions."""
    draw = Random(seed)
    kinds = [
        lambda: draw.choice([0, 1, 1, 1, 2, 3]),
        lambda: draw.randint(1, 9),
        lambda: draw.expovariate(1.0),
        lambda: draw.uniform(1e-6, 9e-6),
        lambda: draw.uniform(1e6, 4e6),
    ]
    for layers in range(2, 10):
        for ranks in range(2, min(layers, 6) + 1):
            for kind in kinds * 2:
                yield [kind() for _ in range(layers)], ranks
    yield [0, 0, 0], 2


@check("14.1")
def check_place(answer, variant):
    """Every rank has consecutive layers, and the slowest stage is as fast as it can be."""
    drawn = [1 + abs(each) for each in randn(variant.size, seed=variant.seed).tolist()]
    compare_placements(answer, [*PLACED, (drawn, variant.ranks)])
    compare_placements(answer, list(drawn_costs(variant.seed)))


def compare_placements(answer, cases):
    found = [placed(answer, costs, ranks) for costs, ranks in cases]
    faults = [misplaced_layers(*case, got) for case, got in zip(cases, found, strict=True)]
    if not any(faults):
        return
    slips = made_everywhere(found, [placing_slips(*case, got) for case, got in zip(cases, found, strict=True)])
    at = next(at for at, fault in enumerate(faults) if fault)
    (costs, ranks), got = cases[at], found[at]
    expect(placing(costs, ranks), got, best_counts(costs, ranks), slips=slips[at], slip=faults[at])


def misplaced_layers(costs, ranks, got):
    """What is wrong with a placement, None if it is one of the best."""
    if len(got) != ranks or sum(got) != len(costs):
        return "each layer is on one rank, and each rank has one number in the list"
    if min(got) < 1:
        return "a stage without a layer: its rank would only pass tensors on"
    if not is_best(costs, ranks, got):
        least = slowest(costs, best_counts(costs, ranks))
        return f"the slowest stage costs {slowest(costs, got):g} instead of {least:g}"
    return None


def placing(costs, ranks):
    return f"layers on each of {ranks} ranks, costs {describe(costs)}"


def placed(answer, costs, ranks):
    """The learner's list of numbers."""
    given, where = list(costs), placing(costs, ranks)
    got = answer(given, ranks)
    expect(f"the costs, after {where}", given, list(costs), slip="the list is the caller's: copy it")
    if not isinstance(got, list | tuple) or not all(type(count) is int for count in got):
        raise AnswerError(f"{where}: expected a number of layers for each rank, got {describe(got)}")
    return list(got)


def placing_slips(costs, ranks, got):
    """The results of mistakes. The first three start from a right placement; there may be several right ones."""
    layers = len(costs)
    undone = {
        "these are the ranks' first layers; return numbers of layers": [
            end - begin for begin, end in pairwise([*got, layers])
        ],
        "these are the ends of the ranks' layers; return numbers of layers": [
            end - begin for begin, end in pairwise([0, *got])
        ],
        "this is the placement, with the ranks from last to first": got[::-1],
    }
    whole = {
        "costs need not be whole numbers, and here they are rounded down": [int(cost) for cost in costs],
        "costs need not be whole numbers, and here they are rounded": [round(cost) for cost in costs],
        "costs are fractions of any size, and here they are rounded": [round(cost, 1) for cost in costs],
    }
    return {text: got if is_best(costs, ranks, counts) else None for text, counts in undone.items()} | {
        "every rank has the same number of layers, whatever they cost": by_number(costs, ranks),
        "every rank has the same number of layers, and the rest is on the last, whatever they cost": rest_to_the_last(
            costs, ranks
        ),
        "a stage closed as soon as it has reached the average leaves too little or too much for the others": (
            until_average(costs, ranks)
        ),
        "a stage closed before it passes the average leaves too much for the last": within_average(costs, ranks),
        "a layer across a share of the total may belong on either side of the cut": at_shares(costs, ranks),
        "cuts nearest to equal shares of the total: a cut that is best alone may be bad for the stages after it": (
            nearest_to_shares(costs, ranks)
        ),
        "the list is halved, and each half again: the best first cut depends on all others": halves(costs, ranks),
        "this minimizes the sum of the squares; a step waits for the slowest stage": best_counts(costs, ranks, squares),
        "this minimizes the difference between the slowest and the fastest stage; a step waits for the slowest": (
            best_counts(costs, ranks, spread)
        ),
        **{text: got if is_best(rounded, ranks, got) else None for text, rounded in whole.items()},
    }


def is_best(costs, ranks, counts):
    if len(counts) != ranks or sum(counts) != len(costs) or min(counts) < 1:
        return False
    return slowest(costs, counts) <= slowest(costs, best_counts(costs, ranks)) * (1 + 1e-9)
