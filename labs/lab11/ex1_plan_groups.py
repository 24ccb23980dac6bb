"""Exercise 11.1: Plan the groups."""

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import planned


@reference(
    "11.1",
    hints=(
        "Rank r is number r % F of sharding group r // F. Which ranks have the same number?",
        "`range(low, low + factor)` for each `low` in steps of `factor`; `range(place, ranks, factor)` for each "
        "`place` of a group. Refuse first: a factor below 1, or one that leaves a remainder.",
    ),
)
def plan_groups(ranks: int, factor: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sharding groups and the replica groups of a world, as lists of ranks.

    Args:
        ranks: N, the number of ranks, which are numbered host by host.
        factor: F, the size of a sharding group, from 1 to N.

    Returns:
        The sharding groups, and the replica groups: ranks with the same position in their sharding
        groups. Groups are ordered by their lowest ranks, and the ranks in each group ascend.

    Raises:
        ValueError: if `factor` is below 1, or does not divide `ranks`.
    """
    if factor < 1 or ranks % factor:
        raise ValueError(f"{ranks} ranks do not make groups of {factor}")
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    replicas = [list(range(place, ranks, factor)) for place in range(factor)]
    return sharding, replicas


@check("11.1")
def check_plan_groups(answer, variant):
    """Neighbours shard together, the same places hold the same shard, and what leaves a remainder is refused."""
    n = variant.ranks
    for ranks, factor in ((6 * n, n), (6 * n, 3), (4, 2), (n, 1), (n, n), (1, 1)):
        setting = f"{ranks} ranks, F = {factor}"
        sharding, replicas = planned(ranks, factor)
        try:
            got = answer(ranks, factor)
        except Exception as error:
            raise AnswerError(f"{setting}: it raises {error!r}, though F divides N") from error
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise AnswerError(f"{setting}: expected a pair of lists, got {type(got).__name__}")
        if strange := [each for part in got for each in part if not isinstance(each, tuple | list)]:
            raise AnswerError(
                f"{setting}: expected groups as lists of ranks, got {strange[0]!r}\n"
                "likely slip: `list(...)` around each group, and each group in a list"
            )
        if list(got) == [replicas, sharding] and sharding != replicas:
            raise AnswerError(
                f"{setting}: the sharding groups and the replica groups are in each other's place\n"
                "likely slip: the groups of neighbours are those that shard, and come first"
            )
        strided = [list(range(place, ranks, ranks // factor)) for place in range(ranks // factor)]
        by_number = [list(range(low, low + ranks // factor)) for low in range(0, ranks, ranks // factor)]
        expect(
            f"{setting}: sharding groups",
            got[0],
            sharding,
            slips={
                "a stride takes ranks of different hosts: consecutive ranks live on one host": strided,
                "F is the size of a sharding group, not the number of them": by_number,
            },
        )
        expect(
            f"{setting}: replica groups",
            got[1],
            replicas,
            slips={
                "every place has replicas, not the first of each group alone": replicas[:1],
                "replicas hold the same shard: ranks of one place in *different* sharding groups": [
                    list(range(low, low + ranks // factor)) for low in range(0, ranks, ranks // factor)
                ],
            },
        )
    for ranks, factor in ((6, 4), (4, 8), (4, 0), (4, -2), (6, -1), (n, -n)):
        try:
            got = answer(ranks, factor)
        except ValueError:
            continue
        except Exception as error:
            raise AnswerError(f"{ranks} ranks, F = {factor}: expected a ValueError, got {error!r}") from error
        slip = "ranks would be left over, in no group or in one that is too small"
        if factor < 0:
            slip = "a negative factor divides, too, and makes no groups: refuse what is below 1"
        raise AnswerError(f"{ranks} ranks, F = {factor}: expected a ValueError, got {got}\nlikely slip: {slip}")
