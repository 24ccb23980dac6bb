"""Exercise 11.6: Choose."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


class Choice(NamedTuple):
    name: str
    factor: int | None


@reference(
    "11.6",
    hints=(
        "Two steps. Which factors fit? Of these, which is the fastest? `min` takes a `key`, and the first of equals.",
        "`fitting = [f for f in sorted(factors) if memory(f) <= capacity]`. If there are any, "
        "`min(fitting, key=seconds)`. If not, compare `rest` with the capacity: sharding over more ranks leaves "
        "`rest` as it is.",
    ),
)
def choose(
    factors: Sequence[int],
    capacity: float,
    memory: Callable[[int], float],
    seconds: Callable[[int], float],
    rest: float,
) -> Choice:
    """Return the fastest sharding factor that fits, or the alternative if none fits.

    Args:
        factors: the possible factors, in any order, from 1 to the number of ranks.
        capacity: bytes of a device's memory.
        memory: returns a rank's peak bytes for a factor; the factor fits if they are not more than `capacity`.
        seconds: returns the seconds of a step for a factor.
        rest: the limit of `memory` as the factor grows.

    Returns:
        The fastest of the factors that fit; among equally fast factors, the smallest, because it sends the fewest
        messages. The name is "data parallelism" for factor 1 (even if it is the only one), "full sharding" for the
        largest of all `factors`, and "hybrid sharding" for any other. If none fits, return ("more ranks", None) if
        `rest` is less than `capacity`, and ("split layers", None) otherwise.
    """
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    if factor == 1:
        return Choice("data parallelism", 1)
    return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)


class Case(NamedTuple):
    """What a choice is made from: bytes and seconds by factor."""

    says: str
    memory: dict[int, float]
    seconds: dict[int, float]
    wanted: tuple[str, Any]
    slip: str
    named_full: str = "with any factor between 1 and the largest it is hybrid"  # where it is called full sharding
    rest: float = 10.0


CASES = (
    Case(
        "the fastest needs too much memory",
        {1: 200.0, 8: 40.0, 4: 60.0, 2: 110.0},
        {1: 1.0, 8: 4.0, 4: 3.0, 2: 2.0},
        ("hybrid sharding", 4),
        "what does not fit cannot be chosen, however fast",
    ),
    Case(
        "a larger factor is faster than the smallest that fits",
        {16: 20.0, 1: 190.0, 2: 100.5, 4: 55.0, 8: 30.0},
        {16: 5.0, 1: 1.0, 2: 1.0, 4: 3.0, 8: 2.0},
        ("hybrid sharding", 8),
        "the smallest that fits is usually the fastest, and not always: ask `seconds`",
        "the largest factor is the largest number, not the last in the list",
    ),
    Case(
        "the largest factor does not fit, a smaller one does",
        {1: 150.0, 2: 60.0, 4: 120.0},
        {1: 3.0, 2: 2.0, 4: 1.0},
        ("hybrid sharding", 2),
        "ask `memory` of every factor: a larger one need not hold less",
        "full sharding is the largest factor there is, not the largest that fits",
    ),
    Case(
        "seconds that rise and fall again",
        {1: 180.0, 2: 90.0, 4: 60.0, 8: 40.0, 16: 25.0},
        {1: 1.0, 2: 3.0, 4: 4.0, 8: 2.0, 16: 5.0},
        ("hybrid sharding", 8),
        "ask `seconds` of every factor that fits: behind one that is not faster there may be one that is",
    ),
    Case(
        "factor 1 needs exactly the capacity",
        {2: 60.0, 1: 100.0, 4: 40.0},
        {2: 2.0, 1: 1.0, 4: 3.0},
        ("data parallelism", 1),
        "what is not more than the capacity fits",
    ),
    Case(
        "one rank",
        {1: 50.0},
        {1: 1.0},
        ("data parallelism", 1),
        "factor 1 goes by the name of data parallelism, though it be the largest, too",
    ),
    Case(
        "the smallest of the factors is 2, and the fastest",
        {8: 30.0, 2: 80.0, 4: 50.0},
        {8: 3.0, 2: 1.0, 4: 2.0},
        ("hybrid sharding", 2),
        "data parallelism is factor 1, not the smallest that is on the list",
    ),
    Case(
        "8 is the only factor",
        {8: 30.0},
        {8: 3.0},
        ("full sharding", 8),
        "the largest factor there is goes by the name of full sharding, though it be the smallest, too",
    ),
    Case(
        "two are equally fast",
        {8: 30.0, 4: 50.0, 2: 80.0, 1: 150.0},
        {8: 2.0, 4: 1.0, 2: 1.0, 1: 1.0},
        ("hybrid sharding", 2),
        "of equally fast ones the smallest, in whatever order the factors come",
    ),
    Case(
        "seconds that differ by thousandths",
        {1: 150.0, 2: 80.0, 4: 50.0, 8: 30.0},
        {1: 1.0, 2: 1.009, 4: 1.006, 8: 1.008},
        ("hybrid sharding", 4),
        "seconds have fractions: compare them as they are, neither rounded nor cut off",
    ),
    Case(
        "only the largest fits",
        {64: 22.0, 1: 800.0, 8: 110.0},
        {64: 3.0, 1: 1.0, 8: 2.0},
        ("full sharding", 64),
        "the largest factor there is goes by the name of full sharding",
    ),
    Case(
        "nothing fits, and `rest` is small",
        {1: 800.0, 2: 405.0, 4: 210.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("more ranks", None),
        "no factor fits, so there is none to return: shards that are too large want more ranks",
    ),
    Case(
        "nothing fits, and `rest` alone is more than the capacity",
        {1: 800.0, 2: 460.0, 4: 290.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("split layers", None),
        "`rest` stays on however many ranks: here only splitting what is whole helps",
        rest=120.0,
    ),
    Case(
        "nothing fits, and `rest` is the capacity",
        {1: 800.0, 2: 450.0, 4: 275.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("split layers", None),
        "`rest` has to be *less* than the capacity: something of the shards is left on any number of ranks",
        rest=100.0,
    ),
    Case(
        "nothing fits, and `rest` is half a byte less than the capacity",
        {1: 800.0, 2: 450.0, 4: 275.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("more ranks", None),
        "bytes per rank have fractions: compare them as they are, neither rounded nor cut off",
        rest=99.5,
    ),
)


@check("11.6")
def check_choose(answer, variant):
    """The fastest of those that fit; and where none fits, whether more ranks would help."""
    for case, unit in [(case, unit) for unit in (1.0, 8.0) for case in CASES]:
        factors = list(case.memory)
        memory = {factor: unit * nbytes for factor, nbytes in case.memory.items()}
        got = answer(factors, unit * 100.0, memory.__getitem__, case.seconds.__getitem__, unit * case.rest)
        if getattr(got, "_fields", None) != ("name", "factor"):
            what = f"expected a `Choice(...)`, got {type(got).__name__}"
            raise AnswerError(f"{case.says}: {what}\nlikely slip: {case.slip}")
        slips = {case.named_full: ("full sharding", case.wanted[1])} if case.wanted[0] == "hybrid sharding" else {}
        what = f"{case.says} (capacity {unit * 100:g}, rest {unit * case.rest:g})"
        slip = case.slip if unit == 1.0 else "how many bytes a device has is an argument: `capacity`"
        expect(what, tuple(got), case.wanted, slips=slips, slip=slip)
        slip = "`sort` changes the caller's list, `sorted` makes one"
        expect(f"{case.says}: `factors` afterwards", factors, list(case.memory), slip=slip)
