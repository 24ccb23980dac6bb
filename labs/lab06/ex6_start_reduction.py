"""Exercise 6.6: Reduce on its own stream."""

from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import CPU, POLLS, WHOLE, asked_meanwhile, current_stream_kept


class Reducing(Protocol):
    """The unit interface that `start_reduction` may use."""

    device: torch.device

    def start_reduce(self) -> None: ...
    def wait_reduce(self) -> None: ...


@reference(
    "6.6",
    hints=(
        "Three things in order: the reduction before this one is over for `stream`; `stream` waits for the gradient; "
        "the reduction is issued. Which of them may name the current stream, and which belongs under `on_stream`?",
        "`while under_way: with device.on_stream(stream): under_way.pop().wait_reduce()`. Then "
        "`stream.wait_stream(device.current_stream(unit.device))` (6.2 in one call), and under `on_stream` again "
        "`unit.start_reduce()`. Last, `under_way.append(unit)`.",
    ),
)
def start_reduction(unit: Reducing, stream: Any, under_way: list[Reducing]) -> None:
    """Issue the reduction of `unit`'s gradient on `stream`, one at a time, while the current stream keeps computing.

    Args:
        unit: has `device`; `start_reduce()`, which allocates the shard's gradient and issues the reduce-scatter, both
            on the current stream; and `wait_reduce()`, which adds the mean to the shard's `.grad` and frees the
            unsharded gradient, also on the current stream.
        stream: the stream for reductions.
        under_way: the units whose reductions were started by earlier calls and have not been waited for yet, possibly
            `unit` itself. On return, this list contains only `unit`.

    First wait, on `stream`, for every reduction in `under_way`, so that those gradients need not be held until this
    unit has been computed. Then make `stream` wait for everything queued on the current stream, where the gradient is
    computed, and start the reduction on `stream`. The current stream, `device.current_stream(unit.device)`, waits for
    nothing.

    Use `stream.wait_stream(other)`, which does in one call what your function from 6.2 does (the check cannot see your
    other cells).
    """
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


class FakeUnit:
    """A unit that says on which stream its methods are called."""

    device = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself

    def __init__(self, name, say):
        self.name, self.say = name, say

    def start_reduce(self):
        self.say(f"start {self.name}", device.current_stream(self.device))

    def wait_reduce(self):
        self.say(f"wait {self.name}", device.current_stream(self.device))


def of_the_units_device(where, current_stream=device.current_stream):
    if where != FakeUnit.device:
        raise AnswerError(
            f"whose current stream it is: expected that of `unit.device`, got that of {where}\n"
            "likely slip: on a GPU the gradient is computed there: `device.current_stream(unit.device)`"
        )
    return current_stream(where)


class Reductions(NamedTuple):
    """What calls in a row ask, with the stream's name behind each; and `under_way` after each call."""

    log: list[str]
    under_way: list[list[str]]
    queries: int


def reduced_by(answer, names, before=(), moves=False):
    """Reductions `before` are from the beginning; if it `moves`, each gradient is computed on another stream."""
    log: list[str] = []
    stream, compute = device.new_stream(CPU), device.current_stream(CPU)
    streams = {id(stream): "stream", id(compute): "compute"}
    events: dict[int, str] = {}
    kept: list[Any] = [stream]

    def say(what, on):
        log.append(f"{what} @{'host' if on is None else streams.get(id(on), 'another')}")

    def note(command):
        if command.verb == "record":
            events[id(command.subject)] = streams.get(id(command.stream), "another")
            kept.append(command.subject)
        elif command.verb == "wait":
            say(f"waits for {events.get(id(command.subject), 'nothing')}", command.stream)
        elif command.verb == "synchronize":
            say(f"synchronize {'device' if isinstance(command.subject, torch.device) else 'event'}", None)

    units = {name: FakeUnit(name, say) for name in (*before, *names)}
    under_way: list[Any] = [units[name] for name in before]
    log += [f"start {name} @stream" for name in before]
    lists = []
    device.command_observers.append(note)
    try:
        with asked_meanwhile() as asked, current_stream_kept():
            for name in names:
                if moves:
                    streams[id(compute)], compute = "an earlier current stream", device.new_stream(CPU)
                    kept.append(compute)
                    streams[id(compute)] = "compute"
                say(f"gradient {name}", compute)
                with device.on_stream(compute), patch.object(device, "current_stream", of_the_units_device):
                    answer(units[name], stream, under_way)
                lists.append([getattr(each, "name", "?") for each in under_way])
    finally:
        device.command_observers.remove(note)
    return Reductions(log, lists, len(asked.queries))


@check("6.6")
def check_start_reduction(answer, variant):
    """Behind its gradient and behind the reduction before it, on its own stream; compute waits for neither."""
    check_reduced(reduced_by(answer, ("2", "1", "0")), {"2": [], "1": ["2"], "0": ["1"]})
    for many in (("4", "3"), ("5", "4", "3")):
        check_reduced(reduced_by(answer, ("2",), many), {"2": list(many)})
    check_reduced(reduced_by(answer, ("2", "1", "0"), moves=True), {"2": [], "1": ["2"], "0": ["1"]})
    got = reduced_by(answer, ("2",), ("2",)).log
    slip = "`unit` itself may be under way, from a reduction before: that is waited for like any other"
    wanted = [
        "start 2 @stream",
        "gradient 2 @compute",
        "wait 2 @stream",
        "waits for compute @stream",
        "start 2 @stream",
    ]
    expect("what happens for a unit that is under way itself", got, wanted, slip=slip)


def check_reduced(found, behind):
    """`behind`: for each unit in order the units whose reductions were under way before its own."""
    got, names = found.log, list(behind)

    def at(event):
        return got.index(event) if event in got else None

    def reject(what, expected, found, slip):
        raise AnswerError(f"{what}: expected {expected}, got {found}\nlikely slip: {slip}\nwhat happened: {got}")

    for name in behind:
        if at(f"start {name} @stream") is not None:
            continue
        if f"start {name} @compute" in got:
            slip = "issued on the current stream it is behind all compute there, and what follows is behind it"
            reject(f"the reduction of {name}", "issued on `stream`", "on the current stream", slip)
        if f"start {name} @another" in got:
            slip = "a new stream knows nothing of the reductions before: there is one for them all, and it is given"
            reject(f"the reduction of {name}", "issued on `stream`", "on another stream", slip)
        reject(f"the reduction of {name}", "issued", "never", "`unit.start_reduce()` issues it")
    for name in behind:
        if got.count(f"start {name} @stream") > 1:
            slip = "the second one reduces a gradient that the first is reducing"
            reject(f"the reduction of {name}", "issued once", f"{got.count(f'start {name} @stream')} times", slip)
    expect("questions of the host to an event", found.queries, 0, slip=POLLS)
    if "synchronize device @host" in got:
        reject("the host", "not to wait", "it synchronizes", WHOLE)
    if "synchronize event @host" in got:
        reject("the host", "not to wait", "it synchronizes", "the host stops for the event; let `stream` wait for it")
    if "waits for stream @compute" in got:
        slip = "the wrong way round: the reduction waits for the gradient, and the compute stream for nothing"
        reject("the compute stream", "not to wait", "it waits for `stream`", slip)
    if "waits for stream @stream" in got:
        slip = "inside `device.on_stream(stream)` the current stream is `stream`: it waits for itself"
        reject("`stream`", "to wait for the compute stream", "it waits for an event of its own", slip)
    for event in got:
        if event.startswith("wait ") and event.endswith("@compute"):
            slip = (
                "the wait belongs on `stream` too: here the compute stream waits, and what is added to the shard's "
                "gradient is added there"
            )
            reject(f"the wait for {event.split()[1]}", "on `stream`", "on the current stream", slip)
        if event.startswith("wait ") and event.endswith("@another"):
            slip = "what the wait adds to the shard's gradient is added where it is called: that belongs on `stream`"
            reject(f"the wait for {event.split()[1]}", "on `stream`", "on another stream", slip)
    for name, left in zip(names, found.under_way, strict=True):
        if left.count(name) > 1:
            reject(
                f"{name} on `under_way`", "once", f"{left.count(name)} times", "what is there twice is waited for twice"
            )
        if not left.count(name) and not any(event.startswith(f"wait {name} ") for event in got):
            slip = "put the unit there, or nobody will ever wait for its reduction: `under_way = ...` is another list"
            reject(f"`under_way` after the call for {name}", f"with {name}", f"without it, {left}", slip)
    own = [name for name in behind if got[at(f"start {name} @stream") + 1 :][:1] == [f"wait {name} @stream"]]
    if own == list(behind):
        slip = "waited for at once: on a CPU that is lab 05 again. The next call waits for it"
        reject(f"the reduction of {own[-1]}", "under way afterwards", "it is over", slip)
    for name, units in behind.items():
        start, gradient = at(f"start {name} @stream"), at(f"gradient {name} @compute")
        handed = [n for n, event in enumerate(got) if event == "waits for compute @stream" and gradient < n < start]
        if not handed and "waits for an earlier current stream @stream" in got[gradient:start]:
            slip = "which stream computes the gradient is asked in each call: it need not be that of the call before"
            reject(f"the reduction of {name}", "after its gradient", "after what an earlier call's stream had", slip)
        if not handed:
            slip = "the gradient is still being computed: `stream` has to wait for the current stream, each time"
            reject(f"the reduction of {name}", "after its gradient", "unordered", slip)
        for before in units:
            check_waited(got, before, (at(f"start {before} @stream"), handed[0], start), len(units), reject)
    repeated = [event for event in got if event.startswith("wait ") and got.count(event) > 1]
    if repeated:
        slip = "take what has been waited for out of `under_way`"
        reject(repeated[0], "once", f"{got.count(repeated[0])} times", slip)
    slips = {
        "put the unit there, or nobody will ever wait for its reduction": [],
        "take out of `under_way` what has been waited for": [*behind[names[0]], *names],
    }
    expect("`under_way` after the last call", found.under_way[-1], names[-1:], slips=slips)


def check_waited(got, before, moments, several, reject):
    """The reduction `before` is waited for after its own start, and before the hand-over and the next start."""
    begun, handed, start = moments
    waits = [n for n, event in enumerate(got) if event.startswith(f"wait {before} @")]
    in_time = [n for n in waits if begun < n < start]
    what = f"the reduction of {before}"
    if not in_time and any(n > start for n in waits):
        slip = "wait first: for a moment two unsharded gradients are held, and one was promised"
        reject(what, "waited for before the next starts", "after it", slip)
    if not in_time and waits:
        slip = "a reduction that has not begun is nothing to wait for: wait for those in `under_way`, not for `unit`"
        reject(what, "waited for between its own start and the next", "before its own start", slip)
    if not in_time and several > 1:
        slip = "all that is under way has to be waited for, however many there are"
        reject(what, "waited for before the next", "not waited for", slip)
    if not in_time:
        slip = "nobody waits for the one before: reductions pile up, each with its unsharded gradient"
        reject(what, "waited for before the next", "not waited for", slip)
    if handed < in_time[0]:
        slip = "so the old gradient stays until this unit, too, has computed: first wait for what is under way"
        reject(what, "waited for before `stream` waits for the compute stream", "after it", slip)
