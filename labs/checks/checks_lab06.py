"""The checks of lab 06.

Streams on CPU are names, so an answer's commands are written down and run on the simulated GPU, whose host runs ahead.
"""

import random
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.machine import Recorder, measured, replay
from minifsdp.instruments.machine.program import (
    DEVICE,
    Allocate,
    Free,
    Issue,
    Kernel,
    Program,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)

CPU = torch.device("cpu")
THE_CALLERS = "the list belongs to the caller, who may need it again: iterate over it, and change nothing"
WHOLE = "`device.synchronize` lets the host stand still until the whole device has done all that is queued"


@contextmanager
def current_stream_kept():
    """An answer leaves every stream that it enters."""
    before = list(device._streams)
    try:
        yield
        after = list(device._streams)
    finally:
        device._streams[:] = before
    if after != before:
        raise AnswerError(
            "the current stream afterwards: expected that of before, got another\n"
            "likely slip: a stream that is entered has to be left again: `with device.on_stream(stream):` does both"
        )


# 6.1 Finish times


class Piece(NamedTuple):
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    host_waits: bool = False


def finish(queued, launch, *, fifo=True, events=True, host=True, blocked=False, early=False, stops=True, whole=False):
    """By going over the pieces until nothing moves; the flags leave something out, as usual mistakes do."""
    starts = [0.0] * len(queued)
    issued = [0.0] * len(queued)
    while True:
        before = (list(starts), list(issued))
        for k, piece in enumerate(queued):
            ends = [start + each.seconds for start, each in zip(starts, queued, strict=True)]
            free = issued[k - 1] if k else -launch if early else 0.0  # the host, when it comes to this piece
            if k and queued[k - 1].host_waits and stops:
                over = max(ends[:k]) if whole else ends[k - 1]
                free = max(free, over - early * launch)
            issued[k] = free + launch
            if blocked:
                issued[k] = max([issued[k], *(ends[j] for j in piece.after)])
            same = [j for j in range(k) if queued[j].stream == piece.stream] if fifo else []
            reasons = [issued[k]] if host else []
            reasons += [ends[j] for j in same]
            reasons += [ends[j] for j in piece.after] if events else []
            starts[k] = max(reasons, default=0.0)
        if before == (starts, issued):
            return [start + piece.seconds for start, piece in zip(starts, queued, strict=True)]


SINGLE = [Piece("a", 2.0), Piece("a", 1.0), Piece("a", 3.0)]
SIDE = [Piece("a", 4.0), Piece("b", 3.0), Piece("a", 1.0), Piece("b", 1.0)]
EVENTS = [Piece("link", 2.0), Piece("compute", 3.0, (0,)), Piece("link", 4.0), Piece("compute", 1.0, (2,))]
RUNS_ON = [Piece("link", 5.0), Piece("compute", 1.0, (0,)), Piece("other", 2.0)]
SLOW_HOST = [Piece("a", 0.25), Piece("b", 0.5), Piece("a", 0.25), Piece("a", 0.25)]
STOPS = [Piece("a", 3.0, (), True), Piece("b", 1.0), Piece("a", 1.0)]
SEVERAL = [Piece("a", 1.0), Piece("b", 5.0), Piece("c", 2.0), Piece("d", 1.0, (0, 1, 2)), Piece("e", 1.0, (3, 2, 0))]
STOPS_FOR_ONE = [Piece("b", 5.0), Piece("a", 1.0, (), True), Piece("a", 1.0)]

PROGRAMS = {
    "one stream": (SINGLE, 0.0),
    "two streams, no events": (SIDE, 0.0),
    "two streams with events": (EVENTS, 0.0),
    "a stream that waits, and another that does not": (RUNS_ON, 0.0),
    "pieces that wait for several": (SEVERAL, 0.0),
    "short pieces and a slow host": (SLOW_HOST, 1.0),
    "a piece that the host waits for": (STOPS, 0.5),
    "a piece that the host waits for, beside a longer one": (STOPS_FOR_ONE, 0.5),
    "nothing queued": ([], 0.5),
}

HOST_SLIPS = {
    "the host has to come to a piece: every piece before it took a launch, and so does it": {"host": False},
    "a stream takes one piece at a time, in the order in which they were queued": {"fifo": False},
    "`after` is forgotten: a stream holds its piece back until those events are over": {"events": False},
    "an event holds the stream back, not the host: what comes later on other streams is issued meanwhile": {
        "blocked": True
    },
    "a piece cannot start before it is queued, so its own `launch` comes first": {"early": True},
    "`host_waits` is forgotten: the host issues nothing before such a piece is over": {"stops": False},
    "the host waits for this piece, and not for what else is queued on the device": {"whole": True},
}


def one_after_another(queued):
    return list(accumulate(piece.seconds for piece in queued))


@check("6.1")
def check_finish_times(answer, variant):
    """Each piece starts at the latest of host, stream and events, on seven programs and a long random one."""
    generator = random.Random(variant.seed)
    long = [
        Piece(
            generator.choice("abc"),
            float(generator.randrange(1, 9)),
            tuple(sorted(generator.sample(range(k), min(k, generator.randrange(5))))),
            generator.random() < 0.1,
        )
        for k in range(4 * variant.size)
    ]
    short = [piece._replace(seconds=piece.seconds / 3e7) for piece in SLOW_HOST]
    more = {"a long one": (long, 0.5), "pieces shorter than a microsecond": (short, 1 / 3e7)}
    for name, (queued, launch) in {**PROGRAMS, **more}.items():
        wanted = finish(queued, launch)
        usual = {text: finish(queued, launch, **flags) for text, flags in HOST_SLIPS.items()}
        usual["one after another, as on a CPU: streams run side by side"] = one_after_another(queued)
        few = [piece._replace(after=piece.after[:2]) for piece in queued]
        usual["a piece waits for all in its `after`, however many they are"] = finish(few, launch)
        last = [piece._replace(after=tuple(sorted(piece.after)[-1:])) for piece in queued]
        usual["of the pieces in `after`, the one with the highest number need not finish last"] = finish(last, launch)
        slips = {text: ends for text, ends in usual.items() if ends != wanted}
        given = list(queued)
        try:
            got = answer(given, launch)
        except IndexError as error:
            slip = "the list may be empty, and has a first and a last piece only if it is not"
            raise AnswerError(f"{name}: expected a list, got IndexError: {error}\nlikely slip: {slip}") from error
        if isinstance(got, list):
            got = [float(end) if isinstance(end, int | float) else end for end in got]
        slip = "times are fractions of a second, however short: round nothing" if queued is short else None
        expect(f"{name}, when each piece is over, in seconds", got, wanted, slips=slips, slip=slip)
        expect(f"{name}, pieces on the list afterwards", len(given), len(queued), slip=THE_CALLERS)


# 6.2 Order two streams


class GpuEvent(device.CpuEvent):
    """What streams of a GPU record: to them an event of the CPU is nothing."""


class GpuStream(device.CpuStream):
    def record_event(self):
        event = GpuEvent()
        event.record(self)
        return event

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Asked(NamedTuple):
    """What is asked of the device, and how often the host asks whether an event has happened."""

    commands: list[device.Command]
    queries: list[device.CpuEvent]


@contextmanager
def asked_meanwhile():
    asked, query = Asked([], []), device.CpuEvent.query
    device.CpuEvent.query = lambda event: not asked.queries.append(event)
    device.command_observers.append(asked.commands.append)
    try:
        yield asked
    finally:
        device.command_observers.remove(asked.commands.append)
        device.CpuEvent.query = query


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


POLLS = "the host polls the event and stands still meanwhile: only the stream has to wait"


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


# 6.3 Gather


class Paper:
    """Rank `rank` of `ranks` that are not there."""

    group_name = "paper"
    _device_types = (CPU,)

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return self._ranks

    def _get_backend(self, where):
        return SimpleNamespace(name=lambda: "paper")


class LastMoment:
    """A link on which nothing arrives before somebody waits for it; until then there is NaN."""

    def __init__(self, fill):
        self.fill, self.waited = fill, 0

    def submit(self, call, collective):
        if call.op != "all_gather":
            raise AnswerError(
                f"the collective: expected all_gather, got {call.op}\n"
                "likely slip: every rank's shard goes to all ranks as it is: that is an all-gather"
            )
        output, shard, *_ = collective.args
        room, needed = output.untyped_storage().nbytes(), output.numel() * output.element_size()
        if room < needed:
            slip = "`flat.full` has no memory yet: `device.allocate` first"
            if room:
                slip = "an element need not have 4 bytes: `device.allocate` asks the buffer for its bytes"
            raise AnswerError(
                f"memory behind the all-gather's output: expected {needed} bytes for the unit, got {room or 'none'}\n"
                f"likely slip: {slip}"
            )
        if shard.dtype != output.dtype:
            raise AnswerError(
                f"dtype of the all-gather's input: expected {output.dtype} like the output, got {shard.dtype}\n"
                "likely slip: a collective does not cast, and shard and unit have one dtype: send `flat.shard.data`"
            )
        if shard.requires_grad:
            raise AnswerError(
                "the all-gather's input: expected plain data, got a parameter\n"
                "likely slip: autograd has no part in it, and on real ranks it raises: `flat.shard.data`"
            )
        output.fill_(torch.nan)

        def wait():
            self.waited += 1
            self.fill(call, output, shard)

        return SimpleNamespace(wait=wait)


def flat_parameter(seed, size, rank, ranks, where=CPU, dtype=torch.float32):
    """Three parameters, 1 element more than a multiple of 12: padding on 2, 3 and 4 ranks. The same on every rank."""
    torch.manual_seed(seed)
    filler = -(3 * size + 5) % 12 + 1
    params = nn.ParameterList([torch.randn(3, size), torch.randn(5), torch.randn(filler)])
    return FlatParameter(find_parameters(params.to(where, dtype)), rank, ranks)


def asked_since(recorder, start):
    return recorder.program().instructions[start:]


def number_of(recorder, stream):
    """A stream's number in the program."""
    return recorder._books._number_of(stream, recorder._books._streams)


@check("6.3")
def check_gather(answer, variant):
    """Allocated and issued on the given stream, nobody waits, and the handle brings every rank's shard."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        gathered_on_paper(answer, variant, dtype)
    ranks = variant.ranks
    full = torch.cat([flat_parameter(variant.seed, variant.size, r, ranks).shard.data + (r + 1) for r in range(ranks)])
    for r, found in enumerate(on_ranks(ranks, gathered_for_real, answer, variant.seed, variant.size, timeout=8)):
        expect("`flat.full` after `handle.wait()`, on real ranks", found, full, rank=r)


def gathered_on_paper(answer, variant, dtype):
    """A unit that is gathered, freed, and gathered again with other values on another stream."""
    ranks, rank = variant.ranks, variant.ranks - 1
    setting = variant.seed, variant.size, ranks
    shards = [flat_parameter(*setting[:2], r, ranks, dtype=dtype).shard.data + (r + 1) for r in range(ranks)]

    def fill(call, output, shard):
        output.copy_(torch.cat([*shards[:rank], shard, *shards[rank + 1 :]]))

    link = LastMoment(fill)
    with link_of(link), Recorder() as recorder:
        flat = flat_parameter(*setting[:2], rank, ranks, dtype=dtype)
        flat.shard.data.add_(rank + 1)
        buffer = flat.full
        for again in ("", ", in a second gather of the unit"):
            link.waited, stream, version = 0, device.new_stream(CPU), buffer._version
            gathered_once(answer, flat, Paper(rank, ranks), stream, recorder, link, again)
            slip = "autograd takes a gather into `flat.full` for a change of what it has saved: gather into its `.data`"
            expect(f"changes of `flat.full` that autograd has counted{again}", buffer._version - version, 0, slip=slip)
            views = [None if view.untyped_storage().nbytes() == 0 else view.detach().clone() for view in flat.views]
            if buffer is not flat.full or any(view is None for view in views):
                raise AnswerError("memory behind `flat.views`: expected that of `flat.full`, got none")
            full, got = torch.cat(shards), buffer.detach().clone()
            slip = "it holds what was gathered before: each call issues a gather of its own" if again else None
            if got.isnan().any():
                slip = "what this rank sends is its shard; its part of `flat.full` holds nothing yet"
            expect(f"`flat.full` after `handle.wait()`{again}", got, full, slip=slip)
            slip = "gather reads the shard and leaves it alone"
            expect("this rank's shard", flat.shard.detach(), shards[rank], slip=slip)
            device.free(buffer)
            flat.shard.data.mul_(2)
            shards = [2 * shard for shard in shards]


def gathered_once(answer, flat, group, stream, recorder, link, again):
    """One call, looked at, and its wait."""
    (flat.shard.data * 1).sum()  # compute is busy: a gather that waits for it is late
    start = len(recorder.program().instructions)
    with current_stream_kept():
        try:
            handle = answer(flat, group, stream)
        except RuntimeError as error:
            if "no process group" not in str(error):
                raise
            slip = "a unit's group need not be all ranks there are: gather over `group`"
            raise AnswerError(
                f"the group of the all-gather: expected `group`, got the world\nlikely slip: {slip}"
            ) from error
    compute = number_of(recorder, device.current_stream(CPU))
    check_asked(recorder.program(), start, flat, (number_of(recorder, stream), compute), again)
    expect("messages that somebody has waited for", link.waited, 0, slip="the caller waits, when it needs the data")
    if not callable(getattr(handle, "wait", None)):
        raise AnswerError(
            f"what is returned: expected the collective's handle, got {type(handle).__name__}\n"
            "likely slip: without the handle nobody can wait: return what `comm.all_gather` returns"
        )
    handle.wait()


def check_asked(program, start, flat, streams, again):
    """One allocation and one all-gather, both on the stream, and no wait of any kind."""
    asked, (stream, compute) = program.instructions[start:], streams
    waits = [each for each in asked if isinstance(each, Wait | WaitEvent | Synchronize)]
    if waits:
        match waits[0]:
            case Wait():
                slip = "waited for: the host, or a stream, stands still until the data is there; return the handle"
            case WaitEvent(_, on) if on == stream:
                slip = (
                    "the gather would start when all compute queued so far is over: it reads the shard alone, and the "
                    "schedule has had the stream wait for the optimizer"
                )
            case Synchronize(event) if event == DEVICE:
                slip = WHOLE
            case WaitEvent():
                slip = "the compute stream waits: it may, just before it uses the data, and by the handle"
            case _:
                slip = "`synchronize` stops the host"
        raise AnswerError(f"waits while the gather is issued: expected 0, got {len(waits)}\nlikely slip: {slip}")
    nbytes, item = flat.full.nbytes, flat.full.element_size()
    allocated = [each for each in asked if isinstance(each, Allocate)]
    issued = [each for each in asked if isinstance(each, Issue)]
    slips = {
        "each call issues a gather of its own: the handle of an earlier one tells nothing of this": [],
        "no gather was issued by then: memory holds anything, and one issued at the wait hides under nothing": [],
        "the padding is gathered, too, or the shards would not be of one length": [("all_gather", flat.numel * item)],
    }
    if not again:
        del slips[next(iter(slips))]
    expect(
        f"collectives (operation, bytes){again}",
        [(each.call.op, each.call.payload) for each in issued],
        [("all_gather", nbytes)],
        slips=slips,
    )
    slip = "issued on the current stream, it starts when all compute queued there is over: use `device.on_stream`"
    if issued[0].stream not in (stream, compute):
        slip = "a stream of its own is in no order with the optimizer, which has written the shard: `stream` is"
    expect("the all-gather was issued on `stream`", issued[0].stream == stream, True, slip=slip)
    sizes = [program.buffers[each.buffer].nbytes for each in allocated]
    slip = "the unit is there twice: gather into `flat.full`, not into a buffer to copy from"
    if sizes and sum(sizes) - nbytes < nbytes:
        slip = "a copy of the shard takes memory of its own: send `flat.shard.data` itself, neither cloned nor cast"
    expect("buffers allocated", len(allocated), 1, slip=slip)
    slip = f"an element has not always 4 bytes, but {item} here: `device.allocate` asks the buffer for its bytes"
    expect("bytes allocated", sizes, [nbytes], slip=slip)
    expect(
        "the memory was allocated on `stream`",
        allocated[0].stream == stream,
        True,
        slip="memory is handed out by stream: that of the compute stream's pool may be in use by kernels queued there, "
        "and the gather, on another stream, does not wait for them. Allocate inside `device.on_stream(stream)`",
    )
    kernels = [each.name for each in asked if isinstance(each, Kernel)]
    expect("kernels", [name for name in kernels if name != "fill_"], [], slip="a gather computes nothing")


def gathered_for_real(answer, seed, size):
    group, where = comm.world(), rank_device()
    flat = flat_parameter(seed, size, group.rank(), group.size(), where)
    flat.shard.data.add_(group.rank() + 1)
    stream = device.new_stream(where)
    stream.wait_stream(device.current_stream(where))
    answer(flat, group, stream).wait()
    return flat.full.detach().cpu().clone()


# 6.4 Missing waits


class Did(NamedTuple):
    verb: str
    what: str
    stream: str


def log_of(text):
    """`gather 0 @link; wait 0 @compute` as a log."""
    return [
        Did(" ".join(words[:-2]), words[-2], words[-1].removeprefix("@")) for words in map(str.split, text.split(";"))
    ]


LOGS = {
    "nothing missing": "gather 0 @link; wait 0 @compute; read 0 @compute; read 0 @compute",
    "no wait at all": "gather 0 @link; read 0 @compute",
    "two units, one wait": "gather 0 @link; gather 1 @link; wait 0 @compute; read 0 @compute; read 1 @compute",
    "the wait comes after the read": "gather 0 @link; read 0 @compute; wait 0 @compute; read 0 @compute",
    "another stream has waited": "gather 0 @link; wait 0 @other; read 0 @other; read 0 @compute",
    "a read on another stream": "gather root @link; wait root @compute; read root @compute; read root @other",
    "gathered again, waited for once": "gather 0 @link; wait 0 @compute; read 0 @compute; gather 0 @link; "
    "read 0 @compute",
    "never gathered": "gather 1 @link; wait 1 @compute; read 0 @compute",
    "an event hands it on": "gather 0 @link; wait 0 @other; record e @other; wait event e @compute; read 0 @compute",
    "an event from before the wait": "gather 0 @link; record e @other; wait 0 @other; wait event e @compute; "
    "read 0 @compute",
    "the event of another stream": "gather 0 @link; wait 0 @other; record e @compute; wait event e @compute; "
    "read 0 @compute",
    "an event handed on twice": "gather 0 @link; wait 0 @a; record e @a; wait event e @b; record f @b; "
    "wait event f @compute; read 0 @compute",
    "an event of the round before": "gather 0 @link; wait 0 @other; record e @other; gather 0 @link; "
    "wait event e @compute; read 0 @compute",
    "one event, recorded twice": "gather 0 @link; record e @other; wait 0 @other; record e @other; "
    "wait event e @compute; read 0 @compute",
    "what the taker knew it keeps": "gather 0 @link; wait 0 @compute; record e @other; wait event e @compute; "
    "read 0 @compute",
    "an event on the gathers' own stream": "gather 0 @link; record e @link; wait event e @compute; read 0 @compute",
    "read where it was issued": "gather 0 @link; read 0 @link",
    "one event, recorded on two streams": "gather 0 @link; wait 0 @a; record e @a; record e @b; "
    "wait event e @compute; read 0 @compute",
    "two waits of one stream": "gather 0 @link; gather 1 @link; wait 0 @compute; wait 1 @compute; read 0 @compute",
    "one event for two streams": "gather 0 @link; wait 0 @a; record e @a; wait event e @b; wait event e @compute; "
    "read 0 @compute",
    "a wait for the later of two": "gather 0 @link; gather 1 @link; wait 1 @compute; read 0 @compute",
    "another unit is gathered": "gather 0 @link; wait 0 @compute; gather 1 @link; read 0 @compute",
    "another unit is gathered, after an event": "gather 0 @link; wait 0 @a; record e @a; gather 1 @link; "
    "wait event e @compute; read 0 @compute",
    "two reads without a wait": "gather root @link; read root @compute; read root @compute",
    "an event that is named like a unit": "gather 0 @link; wait 0 @compute; record 0 @compute; read 0 @compute",
}


def racy(log):
    """By walking back from each read along all that came before it: what happened before, without sets that grow."""

    @cache
    def ordered(number, gather):
        """Whether line `number`, or one that is in order before it, waits for the gather of line `gather`."""
        for before in range(number, -1, -1):
            line = log[before]
            if line.stream != log[number].stream:
                continue
            if line.verb == "wait":
                mine = [n for n in range(before) if log[n].verb == "gather" and log[n].what == line.what]
                if mine and mine[-1] == gather:
                    return True
            if line.verb == "wait event":
                records = [n for n in range(before) if log[n].verb == "record" and log[n].what == line.what]
                if records and ordered(records[-1], gather):
                    return True
        return False

    found = []
    for number, line in enumerate(log):
        if line.verb == "read":
            gathers = [n for n in range(number) if log[n].verb == "gather" and log[n].what == line.what]
            if not gathers or not ordered(number, gathers[-1]):
                found.append(number)
    return found


WHY = {
    "nothing missing": "a wait holds for everything that its stream does afterwards",
    "no wait at all": "a gather is under way until somebody has waited for it",
    "two units, one wait": "a wait belongs to one unit's gather, and says nothing of another's",
    "the wait comes after the read": "only a wait that comes before the read helps it, and helps those behind it",
    "another stream has waited": "a wait holds its own stream back, and no other",
    "gathered again, waited for once": "a wait belongs to one gather: that of the last round is over, this one is not",
    "never gathered": "what was never gathered is not there to be read",
    "an event hands it on": "who waits for an event is ordered after all that the event's stream was ordered after",
    "an event from before the wait": "an event says what its stream was ordered after when it was recorded, not later",
    "the event of another stream": "an event speaks of the stream that recorded it, not of all streams",
    "an event handed on twice": "what was learnt from an event is handed on by the next",
    "an event of the round before": "an event of the round before speaks of that round's gather",
    "one event, recorded twice": "an event that is recorded again has the meaning of the last time",
    "what the taker knew it keeps": "an event adds to what a stream is ordered after, and takes nothing away",
    "an event on the gathers' own stream": "the stream that issues a gather goes on while it is under way: its events "
    "say nothing of the data's arrival",
    "read where it was issued": "the stream that has issued a gather has to wait for it like any other",
    "one event, recorded on two streams": "an event means its last `record` alone: what it said before is gone",
    "two waits of one stream": "a second wait adds to what its stream is ordered after, and takes nothing away",
    "one event for two streams": "an event is there for any number of streams: a wait does not use it up",
    "a wait for the later of two": "a wait is for its own unit's gather, not for all that were issued before it",
    "another unit is gathered": "a gather leaves what was waited for of other units as it is",
    "another unit is gathered, after an event": "a gather leaves what events say of other units as it is",
    "two reads without a wait": "every read that comes too early counts, not its unit's first alone",
    "a read on another stream": "reads on all streams count",
    "an event that is named like a unit": "a name is of a unit or of an event by its verb: keep the two apart",
}


def random_log(generator, length):
    """Actions in any order, with more waits than gathers, so that many reads are right."""
    streams, units, log = ["compute", "other", "link"], ["0", "1"], []
    known = {"wait": [], "wait event": []}
    verbs = ["gather", "wait", "wait", "wait", "record", "wait event", "wait event", "read", "read"]
    while len(log) < length:
        stream, verb = generator.choice(streams), generator.choice(verbs)
        if known.get(verb) == []:
            continue
        if verb == "gather":
            known["wait"].append(what := generator.choice(units))
            stream = "link"
        elif verb == "record":
            known["wait event"].append(what := generator.choice("ef"))
        else:
            what = generator.choice(known.get(verb, units))
        log.append(Did(verb, what, stream))
    return log


@check("6.4")
def check_missing_waits(answer, variant):
    """The reads that may come too early, in short logs by name and in random ones, and no others."""
    again = "what one call has learnt is over in the next: begin with empty tables, made inside the function"
    for name, slip in (("no wait at all", None), ("nothing missing", None), ("no wait at all", again)):
        found_in(answer, log_of(LOGS[name]), f"{name} ({LOGS[name]})", slip or WHY[name])
    for name, text in LOGS.items():
        found_in(answer, log_of(text), f"{name} ({text})", WHY[name])
    generator = random.Random(variant.seed)
    for length in (*(range(6, 46)), 8 * variant.size, 16 * variant.size):
        log = random_log(generator, length)
        short = f" ({'; '.join(f'{verb} {what} @{stream}' for verb, what, stream in log)})" if length < 16 else ""
        found_in(answer, log, f"a random log of {length} lines{short}", None)
    slip = "a log may be empty, and has a first line only if it is not"
    try:
        found_in(answer, [], "an empty log", slip)
    except (IndexError, ValueError) as error:
        raise AnswerError(f"an empty log: it raises {error!r}\nlikely slip: {slip}") from error


def found_in(answer, log, what, slip):
    given, wanted = list(log), racy(log)
    got = answer(given)
    if got is not None and not isinstance(got, list):
        raise AnswerError(f"what is returned: expected a list of line numbers, got {type(got).__name__}")
    if got and got in ([number + 1 for number in wanted], [log[number] for number in wanted]):
        slip = "return the numbers of the lines, the first of which is 0"
    expect(f"{what}: lines that read too early", got, wanted, slip=slip)
    expect(f"{what}: whether the log is as it was", given == log, True, slip=THE_CALLERS)


# 6.5 Free


class Freed(NamedTuple):
    instructions: list[Any]
    readers: dict[int, str]
    given: bool
    kept: int
    same: bool
    hazards: list[Any]
    queries: int


def freed_by(answer, size, from_a_reader, others=1):
    """A buffer of the gathers' stream, read on compute and others, freed, and the next gather into as much memory."""

    def nothing(call, output, shard): ...

    with link_of(LastMoment(nothing)), Recorder() as recorder:
        link, *beside = [device.new_stream(CPU) for _ in range(1 + others)]
        compute = device.current_stream(CPU)
        shard = torch.zeros(256 * size)
        weight = torch.zeros(64, 64)
        link.wait_stream(compute)
        with device.on_stream(link):
            first = device.empty(512 * size, torch.float32, "unsharded", CPU)
            handle = comm.all_gather(first, shard, Paper(0, 2))
        handle.wait()
        for other in beside:
            with device.on_stream(other):
                handle.wait()
                torch.sin(first)
        torch.cos(first)
        weight @ weight  # keeps compute busy
        start, shape, storage = len(recorder.program().instructions), first.shape, first.untyped_storage()
        with (
            asked_meanwhile() as asked,
            device.on_stream(compute if from_a_reader else device.new_stream(CPU)),
            current_stream_kept(),
        ):
            answer(first, given := [compute, *beside])
        instructions = asked_since(recorder, start)
        kept, same = storage.nbytes(), first.shape == shape and first.untyped_storage()._cdata == storage._cdata
        with device.on_stream(link):
            second = device.empty(512 * size, torch.float32, "unsharded", CPU)
            comm.all_gather(second, shard, Paper(0, 2)).wait()
        names = ("compute", "the second reader", "the third reader")
        readers = {number_of(recorder, each): name for each, name in zip([compute, *beside], names, strict=False)}
        program = recorder.program()
    gathers = [number for number, buffer in program.buffers.items() if buffer.tag == "unsharded"]
    for number, name in zip(gathers, ("the first gather", "the second gather"), strict=False):
        program.buffers[number] = program.buffers[number]._replace(name=name)
    run = replay(program, measured(program, 0.0, 1e9, runs_ahead=True))
    as_it_was = len(given) == len(readers) and all(a is b for a, b in zip(given, [compute, *beside], strict=True))
    return Freed(instructions, readers, as_it_was, kept, same, run.hazards, len(asked.queries))


@check("6.5")
def check_free(answer, variant):
    """The bytes are gone, nobody waits, and on the simulated GPU no gather gets them before both readers are done."""
    check_freed(freed_by(answer, variant.size, from_a_reader=False), "")
    check_freed(freed_by(answer, variant.size, from_a_reader=False), ", a second buffer")
    check_freed(freed_by(answer, variant.size, from_a_reader=True), ", called on a reader's own stream")
    try:
        check_freed(freed_by(answer, variant.size, from_a_reader=False, others=2), ", three readers")
        check_freed(freed_by(answer, variant.size, from_a_reader=False, others=0), ", one reader")
    except ValueError as error:
        slip = "there may be one reader or more than two: go over the list"
        raise AnswerError(f"three readers, or one: it raises {error}\nlikely slip: {slip}") from error
    unread = device.empty(8, torch.float32, "unsharded", CPU)
    answer(unread, [])
    slip = "if nobody else reads it, its memory goes at once: give it back after the loop over the readers, not in it"
    expect("bytes behind a buffer without readers", unread.untyped_storage().nbytes(), 0, slip=slip)


def check_freed(found, called):
    asked = found.instructions
    waits = [each for each in asked if isinstance(each, Wait | WaitEvent | Synchronize)]
    slip = "the host stands still until the reader is done; the allocator can wait in its place"
    if waits and all(isinstance(each, WaitEvent) for each in waits):
        slip = "it is not a stream that has to wait, and not here: tell the allocator who reads"
    if Synchronize(DEVICE) in waits:
        slip = WHOLE
    expect(f"waits{called}", len(waits), 0, slip=slip)
    expect(f"questions of the host to an event{called}", found.queries, 0, slip=POLLS)
    if not found.same and not found.kept:
        raise AnswerError("`buffer`: expected the same tensor with the same shape, got another")
    slip = "nothing gives the memory back: the storage has to shrink to 0 bytes"
    if not found.same:
        slip = "the tensor has changed, its storage, which the views share, has not: `untyped_storage().resize_(0)`"
    expect("bytes behind the buffer", found.kept, 0, slip=slip)
    slip = "a copy is other memory: of the buffer's own the allocator takes care, until the readers are done"
    expect(f"buffers allocated{called}", sum(isinstance(each, Allocate) for each in asked), 0, slip=slip)
    kernels = [each.name for each in asked if isinstance(each, Kernel)]
    slip = "to free computes nothing: what is written to the memory now is written while others read it"
    expect(f"kernels{called}", kernels, [], slip=slip)
    told = [each.stream for each in asked if isinstance(each, RecordStream)]
    freed = [number for number, each in enumerate(asked) if isinstance(each, Free)]
    late = any(isinstance(each, RecordStream) for each in asked[freed[0] :]) if freed else False
    names = found.readers
    known = [name for number, name in names.items() if number in told]
    if late:
        slip = "told after the memory was given back, which is too late: there is no memory any more to speak of"
    elif not told:
        slip = (
            "nobody has told the allocator that other streams read it; and what is told after the storage has gone "
            "is not heard"
        )
    elif not known:
        slip = "`device.record_stream` speaks of the current stream: go to each reader with `device.on_stream`"
    elif "second buffer" in called and len(known) < len(names):
        slip = "what was told of one buffer says nothing of the next: each call tells of its own"
    elif len(known) == 1 and "own" in called:
        slip = (
            "the current stream reads, too, and the memory is not its own: the allocator has to be told of it as well"
        )
    elif len(known) < len(names):
        slip = f"it knows of {' and '.join(known)} alone: every reader has to be told of before the memory goes"
    else:
        slip = None
    reused = [hazard.text for hazard in found.hazards]
    for number, name in names.items():
        reused = [text.replace(f"on stream {number}", f"on the stream of {name}") for text in reused]
    expect(f"what the next gather may overwrite too early{called}", reused, [], slip=slip)
    others = "the readers, and no others"
    expect(f"streams that the allocator was told of{called}", sorted(set(told)), sorted(names), slip=slip or others)
    expect(f"whether the list of readers is as it was{called}", found.given, True, slip=THE_CALLERS)


# 6.6 Reduce


class Reducing:
    """A unit that says on which stream its methods are called."""

    device = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself

    def __init__(self, name, say):
        self.name, self.say = name, say

    def start_reduce(self):
        self.say(f"start {self.name}", device.current_stream(self.device))

    def wait_reduce(self):
        self.say(f"wait {self.name}", device.current_stream(self.device))


def of_the_units_device(where, current_stream=device.current_stream):
    if where != Reducing.device:
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

    units = {name: Reducing(name, say) for name in (*before, *names)}
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
