"""Exercise 7.1: Record the order."""

from typing import Literal, NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

from .shared import Order, follow

Event = Literal["begin forward", "pre-forward", "post-forward", "pre-backward", "end backward"]


@reference(
    "7.1",
    hints=(
        "Five events, five cases. Three of them only clear or append. What backward has reached is found from the end "
        "of `ahead`: a unit that was called twice stands there twice, and its backward begins with the last call.",
        "`match event:`. Begin of forward: clear `seen` and `ahead`. Post-forward: append to `ahead`, but only if a "
        "backward follows. Pre-backward: if the unit is in `ahead`, pop from the end until it is the one popped. End "
        "of backward: `forward` takes a copy of `seen` unless it has something already; clear `ahead`.",
    ),
    forbids=(
        PrefetchSchedule.begin_forward,
        PrefetchSchedule.post_forward,
        PrefetchSchedule.issue_forward,
        PrefetchSchedule.issue_backward,
    ),
)
def record(order: Order, event: Event, unit: Unit | None = None, backward_follows: bool = False) -> None:
    """Keep `order` up to date: `forward` in the first iteration, `seen` and `ahead` in every iteration.

    Args:
        order: three lists of units (`forward`, `seen`, `ahead`); change them in place, or replace them.
        event: one of the five events in the table.
        unit: the unit to which the event belongs; None for an event of the whole model.
        backward_follows: used for `post-forward` only; False if the forward runs under `no_grad`.
    """
    match event:
        case "begin forward":
            order.seen.clear()
            order.ahead.clear()
        case "pre-forward":
            order.seen.append(unit)
        case "post-forward" if backward_follows:
            order.ahead.append(unit)
        case "pre-backward" if unit in order.ahead:
            while order.ahead.pop() is not unit:
                pass
        case "end backward":
            order.forward = order.forward or list(order.seen)
            order.ahead.clear()


class Happening(NamedTuple):
    """An event as `record` hears of it."""

    event: str
    unit: str | None = None
    backward_follows: bool = False

    def __str__(self):
        return self.event + ("" if self.unit is None else f" of {self.unit}")


def training(calls, without=()):
    """Forward and backward of units that run in the order of `calls`; `without`: those that get no gradient."""
    return [*forward(calls, True), *backward(calls, without), Happening("end backward")]


def forward(calls, backward_follows):
    inner = [Happening(event, name, backward_follows) for name in calls for event in ("pre-forward", "post-forward")]
    root = [Happening(event, "root", backward_follows) for event in ("pre-forward", "post-forward")]
    return [Happening("begin forward"), root[0], *inner, root[1]]


def backward(calls, without=()):
    """Of a unit that was called twice the backward begins with its last call, and is told once."""
    last_first = dict.fromkeys(reversed(["root", *calls, "root"]))
    return [Happening("pre-backward", name) for name in last_first if name not in without]


ITERATIONS = {
    "an evaluation before any training": forward("AB", False),
    "the first iteration": training("ABC"),
    "the second iteration": training("ABC"),
    "an evaluation": forward("ABC", False),
    "an iteration in another order, A called twice": training("BACA"),
    "an iteration in which C gets no gradient": training("ABCD", without="C"),
    "an iteration in which A, the first in forward, gets no gradient": training("ABC", without="A"),
    "a backward that begins with a unit it was told nothing of": [
        *forward("AB", True),
        Happening("pre-backward", "X"),
        *backward("AB"),
        Happening("end backward"),
    ],
    "a backward that raises in its middle": [*forward("ABC", True), *backward("ABC")[:2]],
    "the iteration after it": training("ABC"),
}


ANOTHER_MODEL = dict(list(ITERATIONS.items())[4:])  # whose first iteration goes another way


def states(record, iterations=ITERATIONS):
    """`forward`, `seen` and `ahead` after each event of each iteration."""
    order, found = Order(), {}
    for iteration, happenings in iterations.items():
        for number, happening in enumerate(happenings):
            record(order, happening.event, happening.unit, happening.backward_follows)
            for field in ("forward", "seen", "ahead"):
                units = getattr(order, field)
                if not isinstance(units, list):
                    raise AnswerError(f"`order.{field}`: expected a list, got an object of type {type(units).__name__}")
                found[iteration, number, f"after {happening}", f"`order.{field}`"] = list(units)
    return found


def but(event, do):
    """`follow`, but for one event."""

    def record(order, happens, unit=None, backward_follows=False):
        if happens == event:
            do(order, unit, backward_follows)
        else:
            follow(order, happens, unit, backward_follows)

    return record


def fix_at_post_forward(order, unit, backward_follows):
    follow(order, "post-forward", unit, backward_follows)
    if unit == "root" and not order.forward:
        order.forward = order.seen[:]


def append_at_pre_forward(order, event, unit=None, backward_follows=False):
    if event == "pre-forward":
        order.ahead = [*order.ahead, unit]
    if event != "post-forward":
        follow(order, event, unit, backward_follows)


def alias_at_end(order, event, unit=None, backward_follows=False):
    """The two lists are one from the end of the first backward on."""
    if event == "begin forward":
        order.seen.clear()
        order.ahead = []
    elif event == "pre-forward":
        order.seen.append(unit)
    elif event == "end backward":
        order.forward, order.ahead = order.forward or order.seen, []
    else:
        follow(order, event, unit, backward_follows)


def first_place(order, unit, _):
    if unit in order.ahead:
        del order.ahead[order.ahead.index(unit) :]


def all_its_places(order, unit, _):
    order.ahead = [each for each in order.ahead if each != unit]


def only_itself(order, unit, _):
    if unit in order.ahead:
        del order.ahead[len(order.ahead) - 1 - order.ahead[::-1].index(unit)]


RECORD_MISTAKES = {
    "`forward` and `seen` are two names of one list, what is cleared there is gone here: copy it": alias_at_end,
    "a forward that no backward follows is no iteration: it must not fix the order; the end of a backward does": but(
        "post-forward", fix_at_post_forward
    ),
    "the recorded order is static: the first iteration's, whatever comes later": but(
        "end backward", lambda order, *_: order.__dict__.update(forward=order.seen[:], ahead=[])
    ),
    "nobody records forward's order: the end of the first backward is the moment": but(
        "end backward", lambda order, *_: order.__dict__.update(ahead=[])
    ),
    "no backward follows a forward under no_grad: what it leaves in `ahead` would be gathered later": but(
        "post-forward", lambda order, unit, _: order.ahead.append(unit)
    ),
    "backward goes by the order in which forwards end, the root's last: append at post-forward": append_at_pre_forward,
    "each call counts in `seen`: a unit that is called twice stands there twice": but(
        "pre-forward", lambda order, unit, _: order.seen.extend([unit] * (unit not in order.seen))
    ),
    "every forward begins with an empty `seen`": but(
        "begin forward", lambda order, *_: order.__dict__.update(ahead=[])
    ),
    "a backward that raised has left its units behind: every forward begins with an empty `ahead`": but(
        "begin forward", lambda order, *_: order.__dict__.update(seen=[])
    ),
    "found at its first place: a unit that was called twice begins its backward with its last call": but(
        "pre-backward", first_place
    ),
    "only one call of it leaves, the last: what lies between that and its first call is still to come": but(
        "pre-backward", all_its_places
    ),
    "what stands behind the unit was skipped by backward: it leaves too, or is gathered for nothing": but(
        "pre-backward", only_itself
    ),
    "what backward has begun is no longer to come: it leaves `ahead`": but("pre-backward", lambda *_: None),
    "a unit that is not in `ahead` changes nothing there": but(
        "pre-backward",
        lambda order, unit, _: follow(order, "pre-backward", unit) if unit in order.ahead else order.ahead.clear(),
    ),
    "when backward is over nothing is to come": but(
        "end backward", lambda order, *_: order.__dict__.update(forward=order.forward or order.seen[:])
    ),
}


@check("7.1")
def check_record(answer, variant):
    """Forward's order fixed by the first iteration, backward's from each; an evaluation leaves nothing."""
    wanted, got = states(follow), states(answer)
    where = next((each for each in wanted if got[each] != wanted[each]), None)
    if where is None:
        wanted, again = states(follow, ANOTHER_MODEL), states(answer, ANOTHER_MODEL)
        where = next((each for each in wanted if again[each] != wanted[each]), None)
        if where is not None:
            slip = (
                "it is kept for all models together: what is remembered belongs in `order`, of which each has its own"
            )
            expect(f"another model: {where[0]}, {where[2]}, {where[3]}", again[where], wanted[where], slip=slip)
        return
    made = {words: states(mistake) for words, mistake in RECORD_MISTAKES.items()}
    slips = [words for words, found in made.items() if found == got]
    slips += [words for words, found in made.items() if found[where] == got[where]]
    iteration, _, when, field = where
    expect(f"{iteration}, {when}, {field}", got[where], wanted[where], slip=next(iter(slips), None))
