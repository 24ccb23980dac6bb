"""Exercise 8.7: Postpone gathers that do not fit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED, Unit

from .shared import FakeUnit


@reference(
    "8.7",
    hints=(
        "The order is that of use: what is needed first is gathered first, and what has no room now waits for its turn "
        "behind it. `gather` makes `whole` longer.",
        "`waiting = [unit for unit in units if unit.state is SHARDED]`; while there are any and `len(whole) < limit`: "
        "`gather(waiting.pop(0))`; return `waiting`.",
    ),
    forbids=(RateLimitedSchedule.prefetch,),
)
def prefetch_within(limit: int, whole: list[Unit], units: Sequence[Unit], gather: Callable[[Unit], None]) -> list[Unit]:
    """Gather units ahead while fewer than `limit` are unsharded; return the units that are postponed.

    Args:
        limit: at least 1.
        whole: the units that are gathered and not yet freed, excluding units that stay unsharded, such as the root.
            There can be more than `limit` of them if units are nested.
        units: the units to gather, in order of use; a unit whose `state` is not SHARDED has already been gathered. This
            includes every unit that stays unsharded.
        gather: gathers a unit, and puts it on `whole`.

    Returns:
        The units that are still SHARDED, in the same order.
    """
    waiting = [unit for unit in units if unit.state is SHARDED]
    while waiting and len(whole) < limit:
        gather(waiting.pop(0))
    return waiting


def in_order(limit, whole, units, gather):
    """8.7 in another way."""
    put_off = []
    for unit in units:
        if unit.state is SHARDED and len(whole) >= limit:
            put_off.append(unit)
        elif unit.state is SHARDED:
            gather(unit)
    return put_off


def with_room(room, order=lambda sharded: sharded):
    """Gathers as many of the sharded units as `room(limit, whole, units)` says, or as a slice up to there has."""

    def prefetch(limit, whole, units, gather):
        sharded = [unit for unit in units if unit.state is SHARDED]
        for unit in order(sharded)[: room(limit, whole, units)]:
            gather(unit)
        return [unit for unit in sharded if unit.state is SHARDED]

    return prefetch


def with_rest(rest):
    """Gathers what is right, and returns `rest(put_off, given, ready)`."""

    def prefetch(limit, whole, units, gather):
        given, ready = list(units), [unit for unit in units if unit.state is not SHARDED]
        return rest(in_order(limit, whole, units, gather), given, ready)

    return prefetch


def left(limit, whole, units):
    return max(0, limit - len(whole))


def up_to_a_ready_one(limit, whole, units):
    ready = [number for number, unit in enumerate(units) if unit.state is not SHARDED]
    return min([left(limit, whole, units), *ready])


def gathered_again(limit, whole, units, gather):
    units = list(units)
    while units and len(whole) < limit:
        gather(units.pop(0))
    return units


def again_once_gathered(limit, whole, units, gather):
    units = [unit for unit in units if unit.state is not GATHERING]
    while units and len(whole) < limit:
        gather(units.pop(0))
    return units


PREFETCH_MISTAKES = {
    "the limit does not hold: postpone the units for which there is no room": with_room(
        lambda limit, whole, units: len(units)
    ),
    "one too many: gather while *fewer* than `limit` are unsharded": with_room(
        lambda limit, whole, units: max(0, limit + 1 - len(whole))
    ),
    "one too few: `limit` units may be unsharded": with_room(
        lambda limit, whole, units: max(0, limit - 1 - len(whole))
    ),
    "those that are unsharded already count as well: `len(whole)`": with_room(lambda limit, whole, units: limit),
    "units are unsharded that are not on the list: all of `whole` counts": with_room(
        lambda limit, whole, units: max(0, limit - sum(unit.state is not SHARDED for unit in units))
    ),
    "`gather` puts the unit on `whole`: counted there and once more, it takes the room of two": with_room(
        lambda limit, whole, units: -(-left(limit, whole, units) // 2)
    ),
    "gather as long as there is room, not one unit for each call": with_room(
        lambda limit, whole, units: min(1, left(limit, whole, units))
    ),
    "more can be unsharded than `limit` (nested units): then there is no room, not a negative one": with_room(
        lambda limit, whole, units: limit - len(whole)
    ),
    "continue after a unit that is gathered already: there may be room for later ones": with_room(up_to_a_ready_one),
    "keep the order of use: the first unit is needed first": with_room(left, order=lambda sharded: sharded[::-1]),
    "a unit that is gathered already is not gathered again": gathered_again,
    "units in either of the other two states are gathered already: compare with SHARDED": again_once_gathered,
    "return the postponed units: those that are forgotten are gathered too late": with_rest(
        lambda put_off, given, ready: []
    ),
    "a unit that has just been gathered is not postponed": with_rest(lambda put_off, given, ready: given),
    "a unit that was gathered before is not postponed": with_rest(
        lambda put_off, given, ready: [unit for unit in given if unit in put_off or unit in ready]
    ),
    "return them in the order of use, the next one first": with_rest(lambda put_off, given, ready: put_off[::-1]),
}


class Prefetched(NamedTuple):
    gathered: list[str]
    put_off: Any
    units: list[str]
    untouched: bool  # `whole` is what it was, and behind it what `gather` has put there


def prefetched(answer, size):
    """By case, what `answer` gathers, puts off, and leaves on the list that it was given."""
    found = {}
    for limit in (1, 2, 3, size):
        for held in range(5):
            for ready in ([], [0], [1], [0, 2]):
                units = [FakeUnit(str(number)) for number in range(size)]
                whole = [FakeUnit(f"before {number}") for number in range(held)]
                for number in ready:
                    units[number].state = UNSHARDED if number % 2 else GATHERING
                whole += [units[number] for number in ready]
                what = f"limit {limit}, {len(whole)} unsharded, {size - len(ready)} of {size} to gather"
                found[what] = prefetched_once(answer, limit, whole, units)
    return found


def prefetched_once(answer, limit, whole, units):
    log: list[str] = []
    kept = list(whole)

    def gather(unit):
        log.append(unit.name)
        unit.state = GATHERING
        whole.append(unit)
        kept.append(unit)

    rest = answer(limit, whole, units, gather)
    names = [unit.name for unit in rest] if isinstance(rest, list | tuple) else type(rest).__name__
    return Prefetched(log, names, [unit.name for unit in units], whole == kept)


@check("8.7")
def check_prefetch_within(answer, variant):
    """In the order of use while there is room; the rest is postponed, in order, and nothing is lost."""
    size = 3 + variant.size % 4
    got, wanted = prefetched(answer, size), prefetched(in_order, size)
    differs = [each for each in wanted if got[each] != wanted[each]]
    if not differs:
        return
    what = next((each for each in differs if got[each][:3] != wanted[each][:3]), differs[0])
    if isinstance(got[what].put_off, str):
        kind = got[what].put_off
        raise AnswerError(f"{what}: expected the list of postponed units, got {kind}: return it")
    made = {words: prefetched(mistake, size) for words, mistake in PREFETCH_MISTAKES.items()}
    gathers = [words for words, found in made.items() if all(found[w].gathered == got[w].gathered for w in wanted)]
    slips = [words for words, found in made.items() if all(found[w][:3] == got[w][:3] for w in wanted)]
    if got[what].gathered != wanted[what].gathered:
        slips += gathers
    slip = next(iter(slips), "gather as long as there is room, and return the rest")
    expect(f"{what}: units gathered", got[what].gathered, wanted[what].gathered, slip=slip)
    expect(f"{what}: postponed units", got[what].put_off, wanted[what].put_off, slip=slip)
    slip = "the list belongs to the caller, who may need it again: build a new one"
    expect(f"{what}: `units` afterwards", got[what].units, wanted[what].units, slip=slip)
    slip = "`whole` belongs to the caller, and `gather` adds to it: only read its length"
    expect(f"{what}: `whole` has what it had, and what was gathered", got[what].untouched, True, slip=slip)
