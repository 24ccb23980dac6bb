"""Exercise 6.2: Order two streams."""

from typing import Any, NamedTuple

import torch

from minifsdp import device
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine import measured, replay
from minifsdp.instruments.machine.program import DEVICE, Kernel, Program, Record, Synchronize, WaitEvent

from .shared import POLLS, WHOLE, asked_meanwhile, current_stream_kept


@reference(
    "6.2",
    hints=(
        "An event is a mark in a stream's queue. One stream leaves it, the other is told not to go on before it has "
        "been passed. In which order does the host have to say that?",
        "`giver.record_event()` marks the end of what is queued on `giver` now, and returns the event; "
        "`taker.wait_event(event)` comes after it. Whatever is called `synchronize` stops the host.",
    ),
)
def order_streams(giver: Any, taker: Any) -> None:
    """Make all work queued on `taker` from now on wait for all work queued on `giver` so far.

    Neither the host nor `giver` waits, and no other order is imposed.

    Args:
        giver, taker: streams (`torch.cuda.Stream` or minifsdp's `CpuStream`), either of which may be the current one. A
            stream has `record_event()`, which puts an event at the end of its queue and returns it, and
            `wait_event(event)`. An event has `synchronize()`, with which the host waits for it.
    """
    taker.wait_event(giver.record_event())


class GpuEvent(device.CpuEvent):
    """What streams of a GPU record: to them an event of the CPU is nothing."""


class GpuStream(device.CpuStream):
    def record_event(self):
        event = GpuEvent()
        event.record(self)
        return event

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Seen(NamedTuple):
    """Seconds at which the kernels started, by name, and for how long the host has stood still."""

    starts: dict[str, float]
    host: float


def kernel(name, stream, seconds):
    return Kernel(name, name, stream, (), (), 0.0, 0, 4, seconds)


def handed_over(commands, streams, busy, elsewhere):
    """3 s on the giver, other work elsewhere, what was asked; then 5 s on the giver, 1 s on taker and compute."""
    numbers = {id(stream): number for number, stream in enumerate(streams)}  # compute, giver, taker, and any others
    events: dict[int, int] = {}
    instructions: list[Any] = [kernel("before", 1, 3.0), kernel("busy", 2, busy), kernel("elsewhere", 0, elsewhere)]
    for verb, stream, subject in commands:
        event = events.setdefault(id(subject), len(events))
        on = numbers.setdefault(id(stream), len(numbers))
        if verb == "synchronize":
            instructions.append(Synchronize(DEVICE if isinstance(subject, torch.device) else event))
        elif isinstance(subject, GpuEvent):
            instructions.append(Record(event, on) if verb == "record" else WaitEvent(event, on))
    instructions += [kernel("after", 1, 5.0), kernel("taken", 2, 1.0), kernel("compute", 0, 1.0)]
    program = Program(instructions, {})
    run = replay(program, measured(program, 0.0, 1.0, runs_ahead=True))
    kernels = [span for span in run.spans if span.lane != "wait"]
    stood = sum(span.duration for span in run.spans if span.lane == "wait")
    return Seen({span.name: span.start for span in kernels}, stood)


def waits_of(commands):
    """Of each wait: the stream that waits, and the one on which its event was recorded; None if none was by then."""
    recorded, waits = {}, []
    for verb, stream, subject in commands:
        if verb == "record":
            recorded[id(subject)] = stream
        elif verb == "wait":
            waits.append((stream, recorded.get(id(subject))))
    return waits


def slip_of(commands, giver, taker, again):
    """What is wrong with an order that does not come about, by what was asked for it."""
    verbs, both = [command.verb for command in commands], (giver, taker)
    recorded = [command.stream for command in commands if command.verb == "record"]
    waits = waits_of(commands)
    waiting = [stream for stream, _ in waits]
    if not commands:
        return "nothing was asked of either stream: leave an event on `giver`, and let `taker` wait for it"
    if any(isinstance(command.subject, torch.device) for command in commands):
        return WHOLE
    if "synchronize" in verbs:
        return "`synchronize` stops the host: let the stream wait, and the host run on"
    if recorded and not any(stream in both for stream in recorded):
        return "the event was recorded on the current stream: `giver.record_event()` leaves it on the giver"
    if waiting and not any(stream in both for stream in waiting):
        return "it is the current stream that waits: `taker.wait_event(event)`"
    if any(stream not in both for stream in waiting):
        return "the current stream waits as well: only `taker` has to, and the current stream has no part in it"
    if any(stream not in both for stream in recorded):
        return "work on the current stream is waited for as well: only the giver's counts"
    if (taker, taker) in waits:
        return "the taker waits for its own event, which holds nothing back: the event belongs on the giver"
    if any(event is None for _, event in waits) and again:
        return "an old event: it tells nothing of what `giver` was given since, so each hand-over records anew"
    if any(event is None for _, event in waits) and recorded:
        return "waited before the event was recorded: such a wait finds nothing to wait for, and returns"
    if verbs == ["record"]:
        return "an event alone holds nobody back: the taker has to wait for it"
    if {giver, taker} <= set(waiting):
        return "a barrier: `giver` waits for `taker` as well, and it should go on"
    if giver in waiting:
        return "the wrong way round: it is the giver that waits here"
    if not any(isinstance(command.subject, GpuEvent) for command in commands):
        return "an event of the CPU orders nothing on a GPU: `giver.record_event()` makes one of the giver's device"
    return None


@check("6.2")
def check_order_streams(answer, variant):
    """The taker starts when the giver has done what was queued before; host, giver and compute run on."""
    giver, taker = GpuStream(), GpuStream()
    for again, current in {
        "": GpuStream(),
        ", the second time": GpuStream(),
        ", if the giver is the current stream": giver,
        ", if the taker is the current stream": taker,
    }.items():
        with device.on_stream(current), asked_meanwhile() as asked, current_stream_kept():
            answer(giver, taker)
        commands, slip = asked.commands, slip_of(asked.commands, giver, taker, again)
        if current in (giver, taker) and not commands:
            slip = "either stream may be the current one, and needs the same event and wait then"
        expect(f"questions of the host to an event{again}", len(asked.queries), 0, slip=POLLS)
        for busy, elsewhere in ((0.0, 0.0), (4.0, 0.0), (0.0, 7.0)):
            got = handed_over(commands, (current, giver, taker), busy, elsewhere)
            when = f"{again}, the taker busy for {busy:.0f} s" if busy else again
            when += f", a third stream busy for {elsewhere:.0f} s" if elsewhere else ""
            expect(f"seconds for which the host stands still{when}", got.host, 0.0, slip=slip)
            wanted = {
                "taken": ("what is queued on the taker afterwards", max(busy, 3.0)),
                "after": ("what is queued on the giver afterwards", 3.0),
                "compute": ("what is queued on the compute stream, which has no part in it", elsewhere),
            }
            for name, (what, start) in wanted.items():
                expect(f"{what} starts at, in seconds{when}", got.starts[name], start, slip=slip)
