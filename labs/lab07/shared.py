"""What several exercises of lab 07 share."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import nn

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.cost.data_parallel import SGD, fsdp
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks
from minifsdp.fsdp import OverlapSchedule, SyncSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED, Unit
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger


class Order:
    """What the notebook's `Order` has, and what is needed to keep it here."""

    def __init__(self):
        self.forward, self.seen, self.ahead = [], [], []


class LabSchedule(Protocol):
    """The schedule interface that an answer may use; the notebook defines the class."""

    order: Order
    depth: int | None

    def gather(self, unit: Unit) -> None: ...
    def free(self, unit: Unit) -> None: ...
    def reduce(self, unit: Unit) -> None: ...


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


def other_end(schedule, unit):
    return at_most(schedule.depth, list(schedule.order.ahead))


def as_recorded(schedule, unit):
    """Backwards through forward's recorded order."""
    order = schedule.order.forward or schedule.order.seen
    return at_most(schedule.depth, order[: order.index(unit)][::-1])


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
