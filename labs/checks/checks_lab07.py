"""The checks of lab 07."""

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from placing import Homes
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.cost.data_parallel import SGD, fsdp
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.fsdp import OverlapSchedule, SyncSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger


def compare(what, got, wanted, slip):
    """Reject unless the events are the wanted ones; names the first difference and what led there."""
    if got == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    before = f"after `{wanted[at - 1]}`" if at else "at the start"
    expected = f"`{wanted[at]}`" if at < len(wanted) else "nothing more"
    found = f"`{got[at]}`" if at < len(got) else "nothing more"
    lines = [f"{what}, {before} (event {at + 1}): expected {expected}, got {found}"]
    if slip:
        lines.append(f"likely slip: {slip}")
    raise AnswerError("\n".join(lines))


# The order, kept by other means than the answer's: by the number of each call


class Order:
    """What the notebook's `Order` has, and what is needed to keep it here."""

    def __init__(self):
        self.forward, self.seen, self.ahead = [], [], []


def follow(order, event, unit=None, backward_follows=False):
    """7.1 in another way."""
    if event == "begin forward":
        order.seen, order.ahead = [], []
    elif event == "pre-forward":
        order.seen = [*order.seen, unit]
    elif event == "post-forward" and backward_follows:
        order.ahead = [*order.ahead, unit]
    elif event == "pre-backward":
        last = max((place for place, each in enumerate(order.ahead) if each is unit), default=len(order.ahead))
        order.ahead = order.ahead[:last]
    elif event == "end backward":
        order.forward, order.ahead = order.forward or order.seen[:], []


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
        "end backward", lambda order, *_: vars(order).update(forward=order.seen[:], ahead=[])
    ),
    "nobody records forward's order: the end of the first backward is the moment": but(
        "end backward", lambda order, *_: vars(order).update(ahead=[])
    ),
    "no backward follows a forward under no_grad: what it leaves in `ahead` would be gathered later": but(
        "post-forward", lambda order, unit, _: order.ahead.append(unit)
    ),
    "backward goes by the order in which forwards end, the root's last: append at post-forward": append_at_pre_forward,
    "each call counts in `seen`: a unit that is called twice stands there twice": but(
        "pre-forward", lambda order, unit, _: order.seen.extend([unit] * (unit not in order.seen))
    ),
    "every forward begins with an empty `seen`": but("begin forward", lambda order, *_: vars(order).update(ahead=[])),
    "a backward that raised has left its units behind: every forward begins with an empty `ahead`": but(
        "begin forward", lambda order, *_: vars(order).update(seen=[])
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
        "end backward", lambda order, *_: vars(order).update(forward=order.forward or order.seen[:])
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


# 7.2 to 7.4: units and a schedule that write down what is done to them


class Told:
    """A unit without memory, which writes down what is done to it."""

    def __init__(self, name, log):
        self.name, self.log, self.state = name, log, SHARDED
        self.is_root = name == "root"

    def begin_gather(self):
        if self.state is SHARDED:
            self.log.append(f"gather {self.name}")
            self.state = GATHERING

    def wait_gather(self):
        if self.state is GATHERING:
            self.log.append(f"wait {self.name}")
            self.state = UNSHARDED

    def release(self):
        if self.state is not SHARDED:
            self.log.append(f"free {self.name}")
            self.state = SHARDED

    def compute(self, phase):
        lacks = {SHARDED: " while sharded", GATHERING: " before its parameters have arrived", UNSHARDED: ""}
        self.log.append(f"{phase} {self.name}{lacks[self.state]}")

    def start_gather(self):
        self.log.append(f"gather {self.name} on the compute stream")
        self.state = GATHERING

    def free(self):
        self.log.append(f"free {self.name} past the schedule")
        self.state = SHARDED

    def start_reduce(self):
        self.log.append(f"reduce {self.name} on the compute stream")

    def wait_reduce(self):
        self.log.append(f"wait for the reduction of {self.name}")


class Schedule:
    """What an answer may ask of a schedule, without streams."""

    def __init__(self, units, depth, log):
        self.units, self.depth, self.log, self.order = units, depth, log, Order()

    def gather(self, unit):
        unit.begin_gather()

    def free(self, unit):
        unit.release()

    def reduce(self, unit):
        self.log.append(f"reduce {unit.name}")


def gather_and_wait(schedule, unit):
    schedule.gather(unit)
    unit.wait_gather()


def free_and_reduce(schedule, unit):
    schedule.free(unit)
    schedule.reduce(unit)


# An answer is steps in some order, with some units to gather ahead: the right ones, or those of a usual mistake.


def recorded(schedule, unit):
    """7.2's units: those that follow in the recorded order, if it has been kept to so far."""
    begun, order = schedule.order.seen, schedule.order.forward
    kept = len(begun) <= len(order) and all(a is b for a, b in zip(begun, order, strict=False))
    return at_most(schedule.depth, order[len(begun) :] if kept else [])


def to_come(schedule, unit):
    """7.3's and 7.4's units: those whose backward is to come."""
    return at_most(schedule.depth, list(reversed(schedule.order.ahead)))


def at_most(depth, units):
    return units if depth is None else units[:depth]


def in_turn(steps, nexts):
    """A piece that does these steps; `ahead` is for the units that `nexts` names."""

    def piece(schedule, unit):
        units = nexts(schedule, unit)
        for step in steps.split():
            match step:
                case "own":
                    schedule.gather(unit)
                case "ahead":
                    for each in units:
                        schedule.gather(each)
                case "wait":
                    unit.wait_gather()
                case "wait-for-them":
                    for each in units:
                        each.wait_gather()
                case "free":
                    schedule.free(unit)
                case "reduce":
                    schedule.reduce(unit)

    return piece


def run(scenario, depth, pre_forward=gather_and_wait, pre_backward=gather_and_wait, post_backward=free_and_reduce):
    """What happens in the iterations of a scenario, a list for each."""
    log: list[str] = []
    root, *blocks = units = [Told(name, log) for name in ("root", *"ABCD")]
    named = {unit.name: unit for unit in blocks}
    schedule = Schedule(units, depth, log)
    order, said = schedule.order, []
    for sequence in SEQUENCES[scenario]:
        log.clear()
        follow(order, "begin forward")
        calls = [named[name] for name in sequence]
        for unit in (root, *calls):
            follow(order, "pre-forward", unit)
            pre_forward(schedule, unit)
            unit.compute("forward")
            if unit is not root:
                unit.release()
                follow(order, "post-forward", unit, True)
        follow(order, "post-forward", root, True)
        backwards = [*reversed(list(enumerate(calls)))]
        if scenario == BRANCHES:  # the last two were computed side by side, and begin their backward in forward's order
            backwards[1:3] = backwards[2:0:-1]
        for place, unit in [(len(calls), root), *backwards]:
            if unit not in calls[place + 1 :]:  # its last call: this is where its backward begins
                follow(order, "pre-backward", unit)
                pre_backward(schedule, unit)
            unit.compute("backward")
            if unit not in calls[:place] and unit is not root:
                post_backward(schedule, unit)
        post_backward(schedule, root)
        follow(order, "end backward")
        for unit in units:
            unit.state = SHARDED  # what was gathered for nothing is freed in the end
        said.append(list(log))
    return said


BRANCHES = "C and B side by side"
SEQUENCES = {  # by iteration the blocks as forward calls them
    "the same order every time": ["ABCD", "ABCD", "ABCD"],
    "A called twice": ["ABAC", "ABAC"],
    "B called twice in a row": ["ABBC", "ABBC"],
    "an order that changes": ["ABCD", "ACBD"],
    "an order that changes at its beginning": ["ABCDABCD", "BACDABCD"],
    BRANCHES: ["ABCD", "ABCD"],
}
DEPTHS = {depth: f"depth {depth}" for depth in (1, 2, None, 3, 0)}
WORDS = ("first iteration", "second iteration", "third iteration")


def outcome_of(piece, function):
    """What happens in each scenario and iteration if `function` is the piece of that name."""
    return {
        (deep, scenario, words): log
        for depth, deep in DEPTHS.items()
        for scenario in SEQUENCES
        for words, log in zip(WORDS, run(scenario, depth, **{piece: function}), strict=False)
    }


def compare_runs(piece, right, answer, mistakes):
    """Reject unless the answer does in every scenario what the right one does; names the mistake that does the same.

    Of the mistakes that would do what the answer does where it goes wrong, one that does so everywhere comes first.
    """
    got, wanted = outcome_of(piece, watched(answer)), outcome_of(piece, right)
    where = next((each for each in wanted if got[each] != wanted[each]), None)
    if where is None:
        return
    slip = of_the_order(got[where]) or of_the_stream(got[where]) or of_the_wait(got[where])
    made = {words: outcome_of(piece, mistake) for words, mistake in mistakes.items()}
    alike = [words for words, log in made.items() if log == got]
    alike += [words for words, log in made.items() if log[where] == got[where]]
    compare(", ".join(where), got[where], wanted[where], slip or next(iter(alike), None))


def watched(answer):
    """The same piece, which notes in the log if it has changed `order.ahead`."""

    def piece(schedule, unit):
        before = list(schedule.order.ahead)
        answer(schedule, unit)
        if list(schedule.order.ahead) != before:
            unit.log.append(CHANGED)

    return piece


CHANGED = "`order.ahead` changed"


def of_the_order(log):
    if CHANGED in log:
        return "`order.ahead` is kept by 7.1, and was changed here: leave it as it is"
    return None


def of_the_stream(log):
    if any("compute stream" in event for event in log):
        return (
            "`unit.start_gather` and `unit.start_reduce` issue on the compute stream, behind all that computes; the "
            "schedule's `gather` and `reduce` know the right one"
        )
    if any("past the schedule" in event for event in log):
        return "`schedule.free(unit)` frees: a schedule may have to know of it"
    return None


def of_the_wait(log):
    if any(event.endswith("while sharded") for event in log):
        return "a unit computes without its parameters: its own gather belongs to it, whatever else is gathered"
    if any(event.endswith("have arrived") for event in log):
        return "nobody has waited: until `unit.wait_gather()` the unit's parameters are not there"
    return None


OWN_FIRST = "its own gather goes first: the link carries one message at a time, and this unit is waited for now"
AFTER_THE_WAIT = "gathers ahead only after the wait: a host that stands still in it lets the link run dry meanwhile"
WAITS_FOR_ALL = "what is gathered ahead is to arrive while this unit computes: wait for this unit alone"
NO_DEPTH = "depth 0 gathers nothing ahead, and None all there are: `or` and a slice from `-0` take one for the other"
DEPTH = "as many units ahead as `schedule.depth` says, and all there are if it is None"
NOTHING = "nothing is gathered ahead: `order.ahead` has those whose backward is to come"
OTHER_END = "backward runs the other way: the unit that comes next is the last of `order.ahead`"
EACH_CALL = "depth counts calls: of a unit that is called twice in a row the second call counts, too"
STATIC = "forward's recorded order is the first iteration's: `order.ahead` is of this one"


def one(nexts):
    return lambda schedule, unit: nexts(schedule, unit)[:1]


def every(nexts):
    """Without regard to the depth."""
    return lambda schedule, unit: nexts(SimpleNamespace(order=schedule.order, depth=None), unit)


def or_all(nexts):
    """A depth of 0 is taken for no limit."""
    return lambda schedule, unit: (nexts if schedule.depth else every(nexts))(schedule, unit)


def two_at_most(nexts):
    """Knows depths of 0, 1, 2 and None."""
    return lambda schedule, unit: nexts(schedule, unit)[: None if schedule.depth is None else 2]


def distinct(nexts):
    """Of several calls of a unit the first alone counts."""
    return lambda schedule, unit: at_most(schedule.depth, list(dict.fromkeys(every(nexts)(schedule, unit))))


def as_built(schedule, unit):
    return at_most(schedule.depth, schedule.units[schedule.units.index(unit) + 1 :])


def kept_or_not(schedule, unit):
    return at_most(schedule.depth, schedule.order.forward[len(schedule.order.seen) :])


def last_kept(calls):
    """Compares so many calls, the last ones, with the recorded order."""

    def nexts(schedule, unit):
        begun, order = schedule.order.seen, schedule.order.forward
        alike = order[max(0, len(begun) - calls) : len(begun)] == begun[-calls:]
        return at_most(schedule.depth, order[len(begun) :] if alike else [])

    return nexts


def by_first_place(schedule, unit):
    order = schedule.order.forward
    return at_most(schedule.depth, order[order.index(unit) + 1 :] if unit in order else [])


def one_too_far(schedule, unit):
    order = schedule.order
    return at_most(schedule.depth, order.forward[len(order.seen) + 1 :] if recorded(schedule, unit) else [])


def other_end(schedule, unit):
    return at_most(schedule.depth, list(schedule.order.ahead))


def as_recorded(schedule, unit):
    """Backwards through forward's recorded order."""
    order = schedule.order.forward or schedule.order.seen
    return at_most(schedule.depth, order[: order.index(unit)][::-1])


FORWARD_MISTAKES = {
    OWN_FIRST: in_turn("ahead own wait", recorded),
    AFTER_THE_WAIT: in_turn("own wait ahead", recorded),
    WAITS_FOR_ALL: in_turn("own ahead wait wait-for-them", recorded),
    "nothing is gathered ahead: forward's order is recorded, and says who comes next": in_turn("own wait", recorded),
    DEPTH: in_turn("own ahead wait", one(recorded)),
    DEPTH + " (here: all, always)": in_turn("own ahead wait", every(recorded)),
    NO_DEPTH: in_turn("own ahead wait", or_all(recorded)),
    DEPTH + " (here: two at most)": in_turn("own ahead wait", two_at_most(recorded)),
    "in the first iteration there is no order to follow: in which order units are built says nothing": in_turn(
        "own ahead wait", as_built
    ),
    "this forward has left the recorded order: what that says of the units to come is a guess, gather nothing": in_turn(
        "own ahead wait", kept_or_not
    ),
    "a forward may leave the order and come back to it: this call alone says little, compare all seen": in_turn(
        "own ahead wait", last_kept(1)
    ),
    "a forward may leave the order and come back to it: the last two calls say little, compare all seen": in_turn(
        "own ahead wait", last_kept(2)
    ),
    EACH_CALL: in_turn("own ahead wait", distinct(recorded)),
    "a unit that is called twice stands in the order twice: `len(order.seen)` says how far forward is": in_turn(
        "own ahead wait", by_first_place
    ),
    "off by one: `seen` has this unit already, so `forward[len(seen)]` is the next": in_turn(
        "own ahead wait", one_too_far
    ),
}
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


# 7.2 to 7.4 on real ranks: bytes, messages, values


class Real(OverlapSchedule):
    """A schedule with one piece of the learner's, in torch's order: a reduction is issued at once."""

    def __init__(self, units, depth, **pieces):
        super().__init__(units)
        self.depth = self.reductions = depth
        self.order = Order()
        given = {"pre_forward": gather_and_wait, "pre_backward": gather_and_wait, "post_backward": free_and_reduce}
        self.pieces = SimpleNamespace(**given | pieces)

    def begin_forward(self):
        super().begin_forward()
        follow(self.order, "begin forward")

    def pre_forward(self, unit):
        follow(self.order, "pre-forward", unit)
        self.pieces.pre_forward(self, unit)

    def post_forward(self, unit, backward_follows):
        super().post_forward(unit, backward_follows)
        follow(self.order, "post-forward", unit, backward_follows)

    def pre_backward(self, unit):
        follow(self.order, "pre-backward", unit)
        self.pieces.pre_backward(self, unit)

    def post_backward(self, unit):
        self.pieces.post_backward(self, unit)

    def reduce(self, unit):
        super().reduce(unit)
        self.issue_reduction()

    def end_backward(self):
        super().end_backward()
        follow(self.order, "end backward")


class Part(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(5, hidden), nn.Linear(hidden, 5)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A root with a parameter before and one behind its parts, of unequal odd sizes."""

    def __init__(self, seed, size):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)
        self.parts = nn.ModuleList(Part(hidden) for hidden in (size, 2 * size + 1, size + 2, 3 * size))

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x).square().mean()


class Trained(NamedTuple):
    losses: list[float]
    unsharded: int
    gradients: int
    calls: list[tuple[str, int]]


def observe_training(answer, piece, seed, size):
    """Three steps with the plain schedule, with the answer one unit ahead, and as far ahead as there are units."""
    schedules = [
        SyncSchedule,
        partial(Real, depth=1, **{piece: answer}),
        partial(Real, depth=None, **{piece: answer}),
    ]
    return [train(schedule, seed, size) for schedule in schedules]


def train(schedule, seed, size):
    where, losses = rank_device(), []
    with Ledger() as ledger:
        model = FullyShardedDataParallel(Net(seed, size).to(where), auto_wrap_policy={Part}, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ledger.watch(model, optimizer)
        for step in range(3):
            ledger.reset_peaks()
            generator = torch.Generator().manual_seed(1000 * seed + 10 * step + comm.world().rank())
            with comm.record() as calls:
                loss = model(torch.randn(2, 5, generator=generator).to(where))
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        unsharded, gradients = ledger.peak_of("unsharded"), ledger.peak_of("gradients", "communication")
    return Trained(losses, unsharded, gradients, [(call.op, call.payload) for call in calls])


def check_training(answer, variant, piece, **ahead):
    """On real ranks: the closed form's bytes, the messages of a step, the losses of the first schedule.

    `ahead`: what the closed form has to know of the piece, as a function of the depth.
    """
    ranks = variant.ranks
    setting = replace(closed_form_setting(ranks), optimizer=SGD)
    model = Net(variant.seed, variant.size)
    parts = [sum(p.numel() for p in part.parameters()) for part in model.parts]
    sizes = [[sum(p.numel() for p in model.parameters()) - sum(parts)], *([part] for part in parts)]
    for rank, (plain, *found) in enumerate(
        on_ranks(ranks, observe_training, answer, piece, variant.seed, variant.size, timeout=10)
    ):
        for depth, trained in zip((1, None), found, strict=True):
            options = {name: depth if value == "depth" else value for name, value in ahead.items()}
            bound = fsdp(sizes, setting, reductions=depth, **options)
            at = f"depth {depth}, "
            expect(at + "unsharded bytes at most", trained.unsharded, bound.unsharded_peak, rank=rank)
            expect(at + "bytes of gradients at most", trained.gradients, bound.gradients_peak, rank=rank)
            expect(at + "messages of a step", sorted(trained.calls), sorted(plain.calls), rank=rank)
            expect(at + "losses beside SyncSchedule's", trained.losses, plain.losses, rank=rank, tolerance=0)


@check("7.2")
def check_pre_forward(answer, variant):
    """The unit's own gather, those ahead, the wait; nothing is gathered by an order that is not known or not kept."""
    compare_runs("pre_forward", in_turn("own ahead wait", recorded), answer, FORWARD_MISTAKES)
    check_training(answer, variant, "pre_forward", forward_depth="depth")


@check("7.3")
def check_pre_backward(answer, variant):
    """The next units of backward are on the link before this one's gradients are computed: one unit more is whole."""
    compare_runs("pre_backward", in_turn("own ahead wait", to_come), answer, PRE_MISTAKES)
    check_training(answer, variant, "pre_backward", backward="pre", backward_depth="depth")


@check("7.4")
def check_post_backward(answer, variant):
    """Freed, then the next gather, then the reduction: no byte more for one unit ahead."""
    compare_runs("post_backward", in_turn("free ahead reduce", to_come), answer, POST_MISTAKES)
    check_training(answer, variant, "post_backward", backward="post", backward_depth="depth")


# 7.5 The same order on all ranks

NAMES = ["root", "encoder", "bridge", "decoder", "head"]
NUMBERS = {  # what each of three ranks, and those beyond as the third, is about to gather
    "all the same": [2, 2, 2],
    "the last rank differs": [1, 1, 3],
    "rank 1 differs": [3, 1, 3],
    "two ranks differ, and rank 0 has their mean": [2, 1, 3],
    "rank 0 stands alone": [4, 2, 2],
    "all the same again": [4, 4, 4],
}
IN_A_PART = "the same in a group of some of the ranks"  # rank 0 is in a group of its own
RANKS = 3  # at least: with two, each rank's own number tells it the other's from the sum


class Said(NamedTuple):
    """What an answer did on a rank.

    Attributes:
        error: what it raised.
        phases: its collectives, as they were issued and waited for.
        groups: whether each of them was of the group that was given.
        dtypes: of the tensors that they were given.
        payloads: their bytes.
        homeless: how many of those tensors were made without a word on where.
    """

    error: str | None
    phases: list[str]
    groups: list[bool]
    dtypes: list[str]
    payloads: list[int]
    homeless: int


class Wire:
    """Looks at the tensors of each collective, and lets it run."""

    def __init__(self, homes):
        self.homes, self.calls, self.tensors = homes, [], []

    def submit(self, call, collective):
        self.calls.append(call)
        self.tensors += [each for each in collective.args if isinstance(each, Tensor)]
        return collective()


def observe_order(answer):
    """In every scenario, what the answer did on this rank."""
    everyone = comm.world()
    parts = [dist.new_group([0]), dist.new_group(list(range(1, everyone.size())))]
    groups = dict.fromkeys(NUMBERS, everyone) | {IN_A_PART: parts[min(everyone.rank(), 1)]}
    return [observe_answer(answer, group, scenario) for scenario, group in groups.items()]


def numbers_of(scenario, ranks):
    several = NUMBERS.get(scenario, [4, 1])
    return [several[min(rank, len(several) - 1)] for rank in range(ranks)]


def observe_answer(answer, group, scenario):
    error, phases, homes = None, [], Homes(rank_device())
    wire = Wire(homes)

    @contextmanager
    def watcher(call, phase):
        phases.append(f"{phase} {call.op}")
        yield

    comm.observers.append(watcher)
    try:
        with homes, link_of(wire):
            answer(numbers_of(scenario, group.size())[group.rank()], list(NAMES), group, homes.device)
    except RuntimeError as raised:
        error = str(raised)
    except ValueError as raised:
        if " parts of " not in str(raised):  # then the all-gather refused its sizes, of which more is said below
            raise
        error = str(raised)
    finally:
        comm.observers.remove(watcher)
    comm.all_reduce(torch.zeros(1, device=homes.device), comm.world()).wait()
    return Said(
        error,
        phases,
        [call.group == group.group_name for call in wire.calls],
        [str(tensor.dtype) for tensor in wire.tensors],
        [call.payload for call in wire.calls],
        sum(map(homes.lacks, wire.tensors)),
    )


def collective_slip(phases):
    """What is wrong with the collectives of an answer."""
    issued = [phase for phase in phases if phase.startswith("issue")]
    if not issued:
        return "without a word from the others no rank can know that their order differs"
    if issued[0] in ("issue all_reduce", "issue reduce"):
        return (
            "of a reduction's result a rank that differs cannot be told, and not every rank sees that one does: gather"
        )
    if len(issued) > 1:
        return "one all-gather brings all numbers to all ranks"
    return "`comm.all_gather` only starts it: before the handle's `wait()` the numbers are not there"


def check_collective(what, said, ranks, rank):
    """One all-gather in the group given, of an int64 of each rank, on the device given, waited for."""
    phases = ["issue all_gather", "wait all_gather"]
    issued = [phase for phase in said.phases if phase.startswith("issue")]
    slip = collective_slip(said.phases)
    expect(what + "what was issued", issued, phases[:1], rank=rank, slip=slip)
    expect(
        what + "in the group given",
        said.groups,
        [True],
        rank=rank,
        slip="`group` need not be all ranks there are: those outside of it do not come to this all-gather",
    )
    expect(
        what + "dtypes of output and shard",
        said.dtypes,
        ["torch.int64"] * 2,
        rank=rank,
        slip="an index is an int64: smaller ones end, and floating point rounds what it cannot hold",
    )
    expect(
        what + "bytes gathered",
        said.payloads,
        [8 * ranks],
        rank=rank,
        slip="one int64 of each rank of `group` is enough, 8 bytes times `group.size()`",
    )
    expect(
        what + "tensors in the collective that were made without `device`",
        said.homeless,
        0,
        rank=rank,
        slip="on a GPU they would be in the host's memory, where NCCL cannot reach them",
    )
    expect(what + "what was issued and waited for", said.phases, phases, rank=rank, slip=slip)


@check("7.5")
def check_check_order(answer, variant):
    """One small all-gather; where the numbers differ all ranks raise, and say who differs and in what."""
    ranks = max(RANKS, variant.ranks)
    seen = on_ranks(
        ranks, observe_order, answer, timeout=8, slip="every rank has to take part, whatever it is about to gather"
    )
    for scenario, told in zip([*NUMBERS, IN_A_PART], zip(*seen, strict=True), strict=True):
        parts = [told] if scenario in NUMBERS else [told[:1], told[1:]]
        for part in parts:
            first = ranks - len(part) if len(parts) > 1 and part is parts[1] else 0
            for rank, said in enumerate(part, start=first):
                check_collective(f"{scenario}: ", said, len(part), rank)
            check_errors(scenario, numbers_of(scenario, len(part)), [said.error for said in part])


def check_errors(scenario, numbers, errors):
    """Every rank raises, or none, and the sentence names the first rank that differs, and both units."""
    differs = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    for rank, error in enumerate(errors):
        what = f"{scenario} (units {', '.join(NAMES[number] for number in numbers)}): "
        if differs is None:
            expect(what + "error", error, None, rank=rank, slip="there is nothing wrong: all gather the same unit")
            continue
        expect(
            what + "raises RuntimeError",
            error is not None,
            True,
            rank=rank,
            slip="a rank that does not raise goes on alone, and waits in its next collective for those that did"
            if any(each is not None for each in errors)
            else "nobody has noticed: compare all the numbers with rank 0's",
        )
        for part, meaning in (
            (f"rank {differs}", "the first rank that differs from rank 0"),
            (NAMES[numbers[differs]], "what that rank is about to gather"),
            (NAMES[numbers[0]], "what rank 0 is about to gather"),
        ):
            if part not in error:
                raise AnswerError(
                    f"rank {rank}, {what}expected a sentence with `{part}` ({meaning}), got: {error}\n"
                    "likely slip: the message has to name the rank and both units"
                )
        others = set(re.findall(r"rank (\d+)", error)) - {"0", str(differs)}
        others |= {name for name in NAMES if name in error} - {NAMES[numbers[0]], NAMES[numbers[differs]]}
        if others:
            raise AnswerError(
                f"rank {rank}, {what}expected a sentence about rank 0 and rank {differs} alone, got: {error}\n"
                "likely slip: everyone's number is too much to read on many ranks: name the first that differs"
            )
    if differs is not None:
        expect(
            f"{scenario}: the sentence is the same on all ranks",
            errors,
            errors[:1] * len(errors),
            slip="all ranks know the same, so all can say the same",
        )
