"""The checks of lab 08."""

from collections import Counter
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from minifsdp import device
from minifsdp.course.reference.lab08 import ROUND, SEGMENT, Block, Memory
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED

GAP = SEGMENT  # between segments, which never touch


class Event:
    """One that happens when it is told to."""

    def __init__(self, log, stream):
        self.log, self.stream, self.past, self.queries = log, stream, False, 0

    def query(self):
        self.queries += 1
        if self.queries > 100:
            raise AnswerError(
                "queries of one event: expected one for each call, got more than 100\n"
                "likely slip: polling an event until it has happened is waiting for it: query it once, and continue"
            )
        return self.past

    def synchronize(self):
        self.log.append("the host waits for an event")
        self.past = True

    wait = synchronize


class FakeDevice:
    """Memory for `room` bytes, and what it was asked for."""

    def __init__(self, room, idle=False):
        self.room, self.next, self.sizes, self.log, self.events = room, 0, {}, [], []
        self.idle = idle  # has done all that is queued

    def new_segment(self, nbytes):
        self.log.append(f"new segment of {nbytes:,}")
        if nbytes > self.room:
            return None
        start, self.next = self.next, self.next + nbytes + GAP
        self.sizes[start] = nbytes
        self.room -= nbytes
        return start

    def give_back(self, start):
        if start not in self.sizes:
            raise AnswerError(
                f"`give_back({start:,})`: expected the start of a segment, got an address that is none\n"
                "likely slip: a free block that is part of a segment cannot go back: some of the segment is in use"
            )
        self.log.append(f"give back {start:,}")
        self.room += self.sizes.pop(start)

    def record(self, stream):
        self.log.append(f"event on stream {stream}")
        self.events.append(Event(self.log, stream))
        self.events[-1].past = self.idle
        return self.events[-1]

    def synchronize(self):
        self.log.append("the host waits for the device")
        for event in self.events:
            event.past = True


def memory_of(room, *segments):
    """A memory whose segments are cut as said: for each segment, pairs of bytes and stream, or of bytes and None.

    Returns it and the blocks in use (those with None), in the order given.
    """
    memory = Memory(FakeDevice(room))
    used = []
    for pieces in segments:
        whole = sum(size for size, _ in pieces)
        stream = next((stream for _, stream in pieces if stream is not None), 0)
        memory.device.room += whole
        at = memory.device.new_segment(whole)
        memory.segments[at] = whole
        for size, free in pieces:
            block = Block(at, size, stream)
            (used if free is None else memory.free).append(block)
            at += size
    memory.device.log.clear()
    return memory, used


def place(block):
    """A block in plain numbers: start, bytes, stream."""
    if block is None:
        return None
    if not all(hasattr(block, name) for name in ("start", "size", "stream")):
        raise AnswerError(f"expected a Block or None, got an object of type {type(block).__name__}")
    return (block.start, block.size, block.stream)


def free_of(memory):
    return sorted(place(block) for block in memory.free)


# 8.1


@check("8.1")
def check_malloc(answer, variant):
    """Rounded up to 512 bytes, the smallest block of the stream that is large enough, split; else a new segment."""
    k = variant.size * ROUND
    small, middle, more, large = 2 * k, 5 * k, 7 * k, 9 * k
    rest = SEGMENT - small - middle - more - large - 2 * k
    cut = [(more, 1), (rest, None), (large, 1), (k, None), (middle, 1), (k, None), (small, 1)]

    def fresh(room=8 * SEGMENT):
        return memory_of(room, [*cut], [(middle, 2), (SEGMENT - middle, None)])

    # What fits exactly
    memory, _ = fresh()
    before = free_of(memory)
    [wanted] = [each for each in before if each[1:] == (small, 1)]
    got = place(answer(memory, small, 1))
    expect("calls of the device where a free block fits", memory.device.log, [], slip=ASK_LATER)
    slips = {
        "the first that is large enough, and not the smallest of them: large blocks are cut up for small requests": (
            min(each for each in before if each[2] == 1)[0],
            small,
            1,
        ),
        "the largest block, which another request will miss: take the smallest that is large enough": (
            next(each for each in before if each[1] == large)[0],
            small,
            1,
        ),
        "the whole block for a part of it: what is left over stays free, as a block of its own": next(
            each for each in before if each[1] == large
        ),
        "a block of just this size is large enough: `>=`, not `>`": (
            next(each for each in before if each[1] == middle)[0],
            small,
            1,
        ),
        ONE_MORE: (next(each for each in before if each[1] == middle)[0], small + ROUND, 1),
    }
    slips[WHOLE] = min(each for each in before if each[2] == 1)
    expect("the block (start, bytes, stream) for a request that one fits exactly", got, wanted, slips=slips)
    left = [each for each in before if each != wanted]
    slips = {
        "the block that was handed out is still on `memory.free`: the next request gets the same bytes": before,
        "a block of 0 bytes is left on `memory.free`: if nothing is left over, there is nothing to split": sorted(
            [*left, (wanted[0] + small, 0, 1)]
        ),
    }
    expect("`memory.free` after it (start, bytes, stream)", free_of(memory), left, slips=slips)

    # What has to be rounded and split
    memory, _ = fresh()
    before = free_of(memory)
    [source] = [each for each in before if each[1:] == (middle, 1)]
    size = small + ROUND
    got = place(answer(memory, size - 100, 1))
    expect("calls of the device where a free block fits", memory.device.log, [], slip=ASK_LATER)
    slips = {
        "not rounded: sizes are multiples of 512 bytes, or the pieces left over fit nothing": (
            source[0],
            size - 100,
            1,
        ),
        "rounded down: the request does not fit in its block": (source[0], small, 1),
        WHOLE: source,
        "it was cut from the end; what is handed out is the block's beginning": (source[0] + middle - size, size, 1),
    }
    expect(f"the block for {size - 100:,} bytes", got, (source[0], size, 1), slips=slips)
    others = [each for each in before if each != source]
    remainder = (source[0] + size, middle - size, 1)
    slips = {
        "the rest of the split is lost: it is free, and belongs on `memory.free`": others,
        "the rest is of its segment's stream": sorted([*others, (*remainder[:2], 0)]),
        "the block that was handed out is still on `memory.free`: the next request gets the same bytes": before,
        "handed out, and still on `memory.free`": sorted([*others, remainder, (source[0], size, 1)]),
    }
    expect("`memory.free` after it (start, bytes, stream)", free_of(memory), sorted([*others, remainder]), slips=slips)

    # However little is left over
    memory, _ = memory_of(0, [(SEGMENT, 1)])
    slips = {"any rest is split off, however small it is and however large the request": (0, SEGMENT, 1)}
    what = "the block for all but 512 bytes of a free one of 2 MiB"
    expect(what, place(answer(memory, SEGMENT - ROUND, 1)), (0, SEGMENT - ROUND, 1), slips=slips)
    expect("`memory.free` after it (start, bytes, stream)", free_of(memory), [(SEGMENT - ROUND, ROUND, 1)])

    # What is recorded on a part is not recorded on the rest
    memory, _ = fresh()
    block = answer(memory, small + ROUND, 1)
    block.users.add(7)
    for rest_of in memory.free:
        slip = "two blocks share one set: `Block(start, size, stream)` has a set of its own, a copy has its original's"
        what = "`users` of a free block after another stream has used the one that was handed out"
        expect(what, sorted(rest_of.users), [], slip=slip)

    # Another stream's blocks are not there for this one
    for stream in (3, 0):
        memory, _ = fresh()
        memory.waiting.append((Block(99 * SEGMENT, middle, stream), [Event([], 4)]))
        before = free_of(memory)
        block = answer(memory, middle, stream)
        theirs = [each for each in before if block is not None and each[0] == block.start]
        if theirs:
            raise AnswerError(
                f"the block for stream {stream}: expected one of a new segment, got free memory of stream "
                f"{theirs[0][2]}\nlikely slip: another stream's free block may still be in use there: kernels of that "
                "stream are queued, and nothing puts them in order with this one's"
            )
        if block is not None and block.start == 99 * SEGMENT:
            raise AnswerError("a block on `memory.waiting` was handed out: its events have not happened")
        segment(memory, answer, block, middle, stream, before)

    # A large request, and no room
    memory, _ = fresh()
    before = free_of(memory)
    segment(memory, answer, answer(memory, SEGMENT + 1, 1), SEGMENT + ROUND, 1, before)
    memory = Memory(FakeDevice(8 * SEGMENT))  # its first segment starts at address 0
    block = answer(memory, small, 1)
    if block is None:
        raise AnswerError(
            "the first block of all, from a segment at address 0: expected a Block, got None\n"
            "likely slip: 0 is a valid address: the device returns None if it has no room, so test `is None`"
        )
    segment(memory, answer, block, small, 1, [])
    memory = Memory(FakeDevice(8 * SEGMENT))
    segment(memory, answer, answer(memory, 2 * SEGMENT, 1), 2 * SEGMENT, 1, [])
    memory, huge = Memory(FakeDevice(2**40)), 40 * 2**30
    segment(memory, answer, answer(memory, huge + 1, 1), huge + ROUND, 1, [])
    memory, _ = fresh(room=SEGMENT - 1)
    waiting = [(Block(99 * SEGMENT, 2 * SEGMENT, 1), [Event([], 4)])]
    memory.waiting = list(waiting)
    before, segments = free_of(memory), dict(memory.segments)
    try:
        got = answer(memory, large + 1, 1)
    except MemoryError as error:
        raise AnswerError(
            f"where the device has no room: expected None, got {type(error).__name__}\n"
            "likely slip: return None: the caller decides what to do, and other memory may still come back (8.5)"
        ) from error
    expect("what is returned where the device has no room", place(got), None)
    expect("`memory.free` where the device has no room", free_of(memory), before)
    expect("`memory.segments` where the device has no room", memory.segments, segments)
    slip = "this is no retry yet: only a retry is counted, where it is made (8.5)"
    expect("`memory.retries` where the device has no room", memory.retries, 0, slip=slip)
    slip = "waiting blocks may still be read: they come back when their events have happened (8.4), or in a retry (8.5)"
    expect("blocks on `memory.waiting` where the device has no room", len(memory.waiting), 1, slip=slip)
    slip = "return None: waiting for the device and asking again is a retry (8.5)"
    expect("calls of the device that has no room", memory.device.log, [f"new segment of {SEGMENT:,}"], slip=slip)


ONE_MORE = "a multiple of 512 needs no rounding: `-(-n // ROUND)` rounds up, `n // ROUND + 1` goes one further"
ASK_LATER = "the device is slow: ask it only if no free block will do"
WHOLE = "the whole block was handed out for a part of it: what is left over stays free, as a block of its own"


def segment(memory, answer, block, size, stream, before):
    """What has to be after a request of `size` that needed a new segment."""
    whole = -(-size // SEGMENT) * SEGMENT
    slips = {
        "a segment is a multiple of 2 MiB: the next requests are served from its rest": [f"new segment of {size:,}"],
        "no free block of this stream is large enough: ask the device for a segment": [],
        "a multiple of SEGMENT needs no rounding: as many bytes more lie idle": [f"new segment of {whole + SEGMENT:,}"],
    }
    slip = "a segment has the bytes of the block, rounded up to a multiple of SEGMENT, and no other size"
    expect("calls of the device", memory.device.log, [f"new segment of {whole:,}"], slips=slips, slip=slip)
    start = max(memory.device.sizes)
    slips = {WHOLE: (start, whole, stream)}
    expect("the block from a new segment", place(block), (start, size, stream), slips=slips)
    expect(
        "`memory.segments` of it",
        memory.segments.get(start),
        whole,
        slip="every segment is entered in `memory.segments`, its bytes by its start: 8.5 needs to know what is whole",
    )
    expect(
        "`memory.free` after it (start, bytes, stream)",
        free_of(memory),
        sorted([*before, *([(start + size, whole - size, stream)] if whole > size else [])]),
        slips={
            "the rest of the new segment is lost: it is free, and belongs on `memory.free`": before,
            "a block of 0 bytes: nothing of the segment is left over": sorted([*before, (start + size, 0, stream)]),
        }
        if whole > size or len(memory.free) > len(before)
        else {},
    )


# 8.2


@check("8.2")
def check_put_back(answer, variant):
    """Free again, and one block with the free neighbours on both sides; blocks in use stay apart."""
    a, b, c = (ROUND * (variant.size + n) for n in (1, 4, 9))
    rest = SEGMENT - a - b - c
    for name, pieces in {
        "alone": [(a, None), (b, "it"), (c, None), (rest, None)],
        "with a free block after it": [(a, None), (b, "it"), (c, 1), (rest, None)],
        "with a free block before it": [(a, 1), (b, "it"), (c, None), (rest, None)],
        "with free blocks on both sides": [(a, 1), (b, "it"), (c, 1), (rest, None)],
        "with all of its segment free": [(a, 1), (b, "it"), (c + rest, 1)],
        "with a free block further on": [(a, None), (b, "it"), (c, None), (rest, 1)],
    }.items():
        cut = [(size, None if free == "it" else free) for size, free in pieces]
        for turned in ("", ", in the opposite order of addresses"):
            check_put_back_case(answer, name, turned, pieces, cut, (a, b))
    half = SEGMENT - 2 * ROUND  # so the second block lies across 2 MiB, and the third begins beyond it
    pieces = [(half, 1), (4 * ROUND, "it"), (2 * SEGMENT - half - 4 * ROUND, 1)]
    cut = [(size, None if free == "it" else free) for size, free in pieces]
    check_put_back_case(answer, LARGE, "", pieces, cut, (half, 4 * ROUND))
    memory, [block, _] = memory_of(0, [(a, 0), (b, None), (c, None), (rest, 0)])
    answer(memory, block)
    wanted = [(0, a + b, 0), (a + b + c, rest, 0)]
    slip = "0 is a valid address and a valid stream: compare with None instead of testing for truth"
    expect("`memory.free`, where stream 0 has the segment at address 0", free_of(memory), wanted, slip=slip)


LARGE = "in the middle of a segment of 4 MiB"


def check_put_back_case(answer, name, turned, pieces, cut, sizes):
    """The block marked "it" comes back; `turned`: the free blocks are listed the other way round."""
    a, b = sizes
    memory, used = memory_of(0, [(SEGMENT, 1)], cut, [(SEGMENT, 1)])
    if turned:
        memory.free.reverse()
    at = [free for _, free in pieces].index("it")
    starts = [2 * SEGMENT + sum(size for size, _ in pieces[:number]) for number in range(len(pieces))]
    [block] = [each for each in used if each.start == starts[at]]
    block.stream = 1
    for each in used:
        if each.start in (starts[at] - a, starts[at] + b):  # a neighbour that is freed, and still read elsewhere
            memory.waiting.append((each, [Event([], 2)]))
    before, waiting = free_of(memory), [place(each) for each, _ in memory.waiting]
    segments = dict(memory.segments)
    near = [number for number in (at - 1, at + 1) if 0 <= number < len(pieces) and pieces[number][1] == 1]
    joined = sorted([at, *near])
    merged = (starts[joined[0]], sum(pieces[number][0] for number in joined), 1)
    gone = [(starts[number], pieces[number][0], 1) for number in near]
    wanted = sorted([*(each for each in before if each not in gone), merged])
    answer(memory, block)
    got = free_of(memory)
    expect(
        f"`memory.free`{turned} after a block {name} came back",
        got,
        wanted,
        slip=why_put_back(name + turned, got, before, merged, gone),
    )
    expect("blocks on `memory.waiting`", [place(each) for each, _ in memory.waiting], waiting)
    slip = "a segment that is free from end to end stays in the cache: only a retry gives it back (8.5)"
    expect("`memory.segments` afterwards", memory.segments, segments, slip=slip)
    expect("calls of the device", memory.device.log, [], slip="nothing is asked of the device here")


def why_put_back(name, got, before, merged, gone):
    """The slip behind a wrong list of free blocks."""
    if name == LARGE:
        return "a large segment is a multiple of 2 MiB: recognize neighbours by where one ends, not by 2 MiB"
    if "opposite" in name:
        return "blocks are on `memory.free` in any order: look for neighbours by their addresses, not by their places"
    new = [each for each in got if each not in before]
    if not new and len(got) == len(before):
        return "the block is nowhere: put it on `memory.free`"
    if any(each[1] > merged[1] for each in new):
        return (
            "made one with what does not touch it or is not free: neighbours are free blocks of which one ends where "
            "the other begins"
        )
    if merged in new and gone:
        return "the neighbours are part of the new block now: take them off `memory.free`, or they are handed out twice"
    if any(each[:2] == merged[:2] for each in new):
        return f"the merged block belongs to the stream of its parts, {merged[2]}"
    if any(each[1] == merged[1] for each in new):
        return "the merged block begins where the first of its parts began"
    if "after" in name and not [each for each in gone if each not in got]:
        return "merge free neighbours: otherwise memory is fragmented, and a large request finds no block"
    return "there can be a free neighbour before it, after it, or both"


# 8.3


def put_back_of(log):
    def put_back(memory, block):
        log.append(f"put back {block.start:,}")
        memory.free.append(block)

    return put_back


@check("8.3")
def check_release(answer, variant):
    """At once where only its own stream has used it; else with an event on each of the others, recorded now."""
    size = ROUND * variant.size
    for users, idle in (
        (set(), False),
        ({2}, False),
        ({2, 3}, False),
        ({3, 5, 2}, False),
        ({2}, True),
        ({0}, False),
        ({4, 0}, False),
    ):
        memory, used = memory_of(0, [(size, None), (SEGMENT - size, 1)])
        memory.device.idle = idle
        block, log = used[0], memory.device.log
        block.stream, block.users = 1, set(users)
        memory.waiting.append((Block(9 * SEGMENT, size, 1), [Event([], 4)]))
        answer(memory, block, put_back_of(log))
        text = f"a block of stream 1, used on {', '.join(map(str, sorted(users))) or 'no other'}"
        text += ", on an idle device" if idle else ""
        found = Counter(log)
        waits = [entry for entry in memory.waiting if entry[0] is block]
        others = len(memory.waiting) - len(waits)
        expect(
            f"{text}: others on `memory.waiting`",
            others,
            1,
            slip="blocks that wait already must stay on the list: append to it",
        )
        if any("host waits" in each for each in log):
            raise AnswerError(
                f"{text}: expected the host to go on, got a host that waits\n"
                "likely slip: recording an event puts a marker into a queue; the block waits for it, not the host"
            )
        if not users:
            slip = "no other stream uses it: what its own stream does next comes after what it has done"
            expect(f"{text}: what was done", log, ["put back 0"], slip=slip)
            expect("entries of it on `memory.waiting`", len(waits), 0, slip=slip)
            continue
        wanted = Counter(f"event on stream {stream}" for stream in users)
        slip = None
        if 0 in users and not found["event on stream 0"]:
            slip = "stream 0 is a valid stream: it is the default one"
        elif found["put back 0"] and idle:
            slip = "`collect` asks before the next `malloc` whether an event has happened"
        elif found["put back 0"]:
            slip = "it is free at once, while other streams still read it" + (
                "; it waits for their events, and `collect` puts it back" if waits else ": reused too early"
            )
        elif found["event on stream 1"]:
            slip = "the event belongs on the streams that use the block, `block.users`, not on the block's own"
        elif not found and waits:
            slip = "call `record` now: it must not be called only when the entry is read later"
        elif sum(found.values()) < len(users):
            slip = "every stream in `block.users` has a queue of its own, and needs an event of its own"
        expect(f"{text}: what was done", sorted(found.elements()), sorted(wanted.elements()), slip=slip)
        expect("entries on `memory.waiting`", len(waits), 1, slip="the block and its events wait there, as one entry")
        events = waits[0][1]
        expect(
            f"{text}: events it waits for",
            sorted(event.stream for event in events),
            sorted(users),
            slip="every stream in `block.users` has a queue of its own: all of their events go into the entry",
        )
        expect(
            "`block.users` afterwards",
            sorted(block.users),
            [],
            slip="the block's next owner starts with no other users: empty `block.users`, once the events are recorded",
        )


# 8.4


class Soon(Event):
    """One that happens just after it was first asked for."""

    def query(self):
        before, self.past = self.past, True
        return before


@check("8.4")
def check_collect(answer, variant):
    """Every block whose events have all happened is free again, wherever it stands, and the host has not waited."""
    size = ROUND * variant.size
    pasts = [[True], [True], [False], [True, False], [False, True], [True, True], [True], [False], [True]]
    pasts += [[True, False, True], [False, False], [True, True, True]]
    count = len(pasts)
    memory, used = memory_of(0, [*[(size, None)] * count, (SEGMENT - size * count, 1)])
    log = memory.device.log
    for block, past in zip(used, pasts, strict=True):
        events = [memory.device.record(2) for _ in past]
        for event, happened in zip(events, past, strict=True):
            event.past = happened
        memory.waiting.append((block, events))
    every = list(memory.device.events)
    log.clear()
    answer(memory, put_back_of(log))
    if any("host waits" in each for each in log):
        raise AnswerError(
            "expected the host to go on, got a host that waits\n"
            "likely slip: before every `malloc` the host asks what has happened, with `event.query()`, and continues"
        )
    back = [number for number, past in enumerate(pasts) if all(past)]
    got = sorted(int(each.split()[-1].replace(",", "")) // size for each in log if each.startswith("put back"))
    first = next(number for number, past in enumerate(pasts) if not all(past))
    slips = {
        "one event is not enough: each stream that uses the block has one, and all have to have happened": [
            number for number, past in enumerate(pasts) if any(past)
        ],
        "continue after an event that has not happened: later blocks may be free all the same": back[:first],
        "an entry was passed over: a list that loses entries while you go over it skips the next one": None,
        "every event of a block has to have happened, not the last of them alone": [
            number for number, past in enumerate(pasts) if past[-1]
        ],
        "every event of a block has to have happened, not the first of them alone": [
            number for number, past in enumerate(pasts) if past[0]
        ],
        "every event of a block has to have happened, those in the middle as well": [
            number for number, past in enumerate(pasts) if past[0] and past[-1]
        ],
        "continue after the first block: later ones may be free as well": back[:1],
        "`event.query()` says whether an event has happened, and was never called": list(range(count)),
        "the blocks have to be free again: `put_back(memory, block)`": [],
    }
    missing = [number for number in back if number not in got]
    skipped = bool(missing) and all(number - 1 in back for number in missing) and set(got) < set(back)
    chosen = "an entry was passed over: a list that loses entries while you go over it skips the next one"
    usual = {text: wrong for text, wrong in slips.items() if wrong is not None}
    known = any(got == wrong for wrong in usual.values())
    expect(f"blocks put back (of {count})", got, back, slips=usual, slip=chosen if skipped and not known else None)
    left = [used.index(block) for block, _ in memory.waiting]
    expect(
        "blocks still on `memory.waiting`",
        left,
        [number for number in range(count) if number not in back],
        slip="take what is put back off the list: otherwise a later call puts it back again, and two get its bytes",
    )
    answer(memory, put_back_of(log))
    expect("blocks put back by another call, with nothing new", len(log), len(back))
    of_two = next(events for block, events in memory.waiting if block is used[pasts.index([False, False])])
    of_two[0].past = True
    answer(memory, put_back_of(log))
    slip = "each call queries all events of an entry: those that have not happened stay with it"
    expect("blocks put back by a call after one of two events has happened", len(log) - len(back), 0, slip=slip)
    for event in every:
        event.past = True
    answer(memory, put_back_of(log))
    slip = "an event that has not happened yet may have happened by the next call: query it again"
    expect("blocks put back in all, after every event has happened", len(log), count, slip=slip)

    # Many of them
    blocks = [Block(2 * SEGMENT * number, SEGMENT, 1) for number in range(1_500)]
    memory = Memory(FakeDevice(0, idle=True))
    memory.waiting = [(block, [memory.device.record(2)]) for block in blocks]
    try:
        answer(memory, put_back_of([]))
    except RecursionError as error:
        raise AnswerError(
            "1,500 blocks to put back: expected all of them, got RecursionError\n"
            "likely slip: a call for each block is one too many for Python's stack: use a loop"
        ) from error
    expect("blocks still on `memory.waiting`, of 1,500 that can come back", len(memory.waiting), 0)

    # The device goes on meanwhile
    memory, used = memory_of(0, [(size, None), (SEGMENT - size, 1)])
    memory.waiting.append((used[0], [Soon(memory.device.log, 2)]))
    answer(memory, put_back_of(memory.device.log))
    expect(
        "a block whose event happens during the call: lists that it is on",
        len(memory.waiting) + len(memory.free) - 1,
        1,
        slip="two queries can give two answers: query each event once, and use that answer for both lists",
    )


# 8.5


@check("8.5")
def check_malloc_or_retry(answer, variant):
    """Only when there is no room: wait, take back, give whole segments back, once more; counted; else MemoryError."""
    size = ROUND * variant.size
    log: list[str] = []
    requests: list[tuple[int, int]] = []

    def malloc(memory, nbytes, stream):
        """One that knows the cache and the device: a free block from its start, or a segment."""
        log.append("malloc")
        requests.append((nbytes, stream))
        for block in memory.free:
            if block.stream == stream and block.size >= nbytes:
                memory.free.remove(block)
                return block
        start = memory.device.new_segment(-(-nbytes // SEGMENT) * SEGMENT)
        if start is None:
            return None
        memory.segments[start] = memory.device.sizes[start]
        return Block(start, memory.segments[start], stream)

    def put_back(memory, block):
        entries = [events for each, events in waited if each is block]
        if entries and not all(event.query() for event in entries[0]):
            raise AnswerError(
                "a waiting block was put back before its events had happened\n"
                "likely slip: first `memory.device.synchronize()`: after it all of them have"
            )
        log.append("put back")
        for other in list(memory.free):
            if block.start in (other.start - block.size, other.start + other.size):
                memory.free.remove(other)
                block.start, block.size = min(block.start, other.start), block.size + other.size
        memory.free.append(block)

    def ready(room):
        """Five segments: two of stream 2; a part; one of which all waits or is free; one of stream 1."""
        memory, used = memory_of(
            room,
            [(SEGMENT, 2)],
            [(SEGMENT, 2)],
            [(SEGMENT, 2), (SEGMENT - size, None), (size, 2)],
            [(size, 2), (size, None), (SEGMENT - 2 * size, None)],
            [(2 * SEGMENT, 1)],
        )
        for block in used[1:]:
            memory.waiting.append((block, [memory.device.record(1)]))
        memory.device.log, memory.retries = log, 3
        for event in memory.device.events:
            event.log = log
        log.clear()
        return memory

    # There is room
    memory = ready(SEGMENT)
    waited = list(memory.waiting)
    block = answer(memory, SEGMENT, 3, malloc, put_back)
    expect(
        "what was done where there is room",
        log,
        ["malloc", f"new segment of {SEGMENT:,}"],
        slip="give the cache back only if `malloc` has found nothing: this is what makes a retry slow",
    )
    expect(
        "`memory.retries` where there is room", memory.retries, 3, slip="count only requests that had to be tried again"
    )
    expect("what is returned", getattr(block, "size", None), SEGMENT)

    # There is none, and then there is: all that can come back is needed
    memory, nbytes = ready(0), 5 * SEGMENT - 100
    waited = list(memory.waiting)
    requests.clear()
    try:
        block = answer(memory, nbytes, 1, malloc, put_back)
    except MemoryError as error:
        raise AnswerError(f"expected a block, got MemoryError\nlikely slip: {why_no_room(log, memory)}") from error
    if block is None:
        raise AnswerError(f"expected a block, got None\nlikely slip: {why_no_room(log, memory)}")
    given = [each for each in log if each.startswith("give back")]
    expect("what is returned", getattr(block, "size", None), 5 * SEGMENT)
    wanted = [f"give back {start:,}" for start in (0, 2 * SEGMENT, 7 * SEGMENT, 9 * SEGMENT)]
    expect("segments given back", sorted(given), sorted(wanted), slip=why_no_room(log, memory))
    expect(
        "`memory.free` afterwards (bytes)",
        sorted(each.size for each in memory.free),
        [size, SEGMENT],
        slip="what went back to the device is still on `memory.free`: it would be handed out although it is gone",
    )
    expect(
        "`memory.segments` afterwards",
        sorted(memory.segments.values()),
        [2 * SEGMENT, 5 * SEGMENT],
        slip="remove the segments that went back to the device from `memory.segments`",
    )
    expect(
        "blocks on `memory.waiting`",
        len(memory.waiting),
        0,
        slip="remove the blocks that were put back from `memory.waiting`",
    )
    slip = "add one to the count for every retry, and keep those before: users look at this number"
    expect("`memory.retries`, 3 before", memory.retries, 4, slip=slip)
    slip = "wait once, for the device: waiting for each event stops the host as often"
    expect("how often the host has waited for the device", log.count("the host waits for the device"), 1, slip=slip)
    expect("calls of `malloc`", log.count("malloc"), 2, slip="there is one more attempt, and no third")
    expect("requests of `malloc` (bytes, stream)", requests, 2 * [(nbytes, 1)], slip=SAME_REQUEST)

    # Nothing waits, and there is a segment to give back
    memory, _ = memory_of(0, [(SEGMENT, 2)])
    memory.device.log = log
    requests.clear()
    try:
        answer(memory, SEGMENT, 3, malloc, put_back)
    except MemoryError as error:
        raise AnswerError(
            "nothing waits, and a segment of another stream is free: expected a block, got MemoryError\n"
            "likely slip: a free segment can be given back even if no block was waiting"
        ) from error
    expect("requests of `malloc` (bytes, stream)", requests, 2 * [(SEGMENT, 3)], slip=SAME_REQUEST)

    # There is none, whatever one does
    memory = ready(0)
    waited = list(memory.waiting)
    try:
        block = answer(memory, 6 * SEGMENT, 1, malloc, put_back)
    except MemoryError:
        expect("`memory.retries`, 3 before", memory.retries, 4, slip="this was a retry, too")
        expect("calls of `malloc`", log.count("malloc"), 2, slip="there is one more attempt, and no third")
        return
    except RuntimeError as error:
        raise AnswerError(
            f"no room even with the cache given back: expected MemoryError, got {type(error).__name__}\n"
            "likely slip: the docstring promises MemoryError, and the caller catches nothing else"
        ) from error
    raise AnswerError(
        f"no room even with the cache given back: expected MemoryError, got {'None' if block is None else 'a block'}\n"
        "likely slip: raise MemoryError: a caller that received None would write to address 0"
    )


SAME_REQUEST = "the second attempt is for the same request: `malloc` rounds by itself"


def why_no_room(log, memory):
    """Why the second attempt has found nothing."""
    given = [number for number, each in enumerate(log) if each.startswith("give back")]
    back = [number for number, each in enumerate(log) if each == "put back"]
    if log.count("malloc") < 2:
        return "after the cache is given back, `malloc` is tried once more"
    if "the host waits for the device" not in log:
        return "blocks that wait for events come back only after these: call `memory.device.synchronize()`"
    if not back and memory.waiting:
        return "after the synchronization every waiting block can come back: `put_back` all of them"
    if not back:
        return "only `put_back` merges a block with its free neighbours, and so makes its segment whole"
    if len(back) == 1:
        return f"of two blocks on `memory.waiting` one was passed over: {SKIPS}"
    if not given:
        return "free memory of another stream does not help this one: the device has to get it back"
    if given[0] < back[0]:
        return "given back too early: the blocks that were waiting make further segments whole"
    starts = [int(log[number].split()[-1].replace(",", "")) for number in given]
    if len(given) > 4 or 4 * SEGMENT in starts:
        return (
            "a free block at the start of a segment, or as large as some segment, need not be all of it: compare with "
            "`memory.segments[block.start]`"
        )
    left = [block for block in memory.free if memory.segments.get(block.start) == block.size]
    if len(given) == 1 and starts != [9 * SEGMENT]:
        return "give back every segment that is entirely free, not only one of them"
    if starts == [9 * SEGMENT]:
        return "free memory of another stream does not help this one: give its segments back, too"
    if left and all(block.stream == 1 for block in left):
        return "the request's own stream has whole segments, too: two of them are no room for one that is larger"
    if len(left) == 1:
        return "put all waiting blocks back first: only then is it known which segments are entirely free"
    if left:
        return f"a whole segment was passed over: {SKIPS}"
    return None


SKIPS = "a list that loses entries while you go over it skips the next one"


# 8.6


class FakeUnit:
    """As much of a unit as a limiter may look at."""

    device = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself

    def __init__(self, name, stays=False):
        self.name, self.state, self.freed_after_forward = name, SHARDED, not stays
        self.is_root = name == "root"
        self.reshard_after_forward = self.is_root or not stays


ELSEWHERE = " on a stream that is not current"


@contextmanager
def told(log):
    """The events that are recorded, and those that the host waits for, by the number of the record."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []

    def watch(command):
        if command.verb == "record":
            kept.append(command.subject)
            numbers[id(command.subject)] = len(kept)
            here = command.stream is device.current_stream(FakeUnit.device)
            log.append(f"event {len(kept)}" + ("" if here else ELSEWHERE))
        elif command.verb == "synchronize":
            log.append(f"wait for {numbers.get(id(command.subject))}")

    device.command_observers.append(watch)
    try:
        yield
    finally:
        device.command_observers.remove(watch)


def limited_log(answer, limit, program):
    """What happens when a program of (verb, unit) runs through the answer's pair."""
    log: list[str] = []

    def gather(unit):
        log.append(f"gather {unit.name}")
        if unit.state is SHARDED:
            unit.state = GATHERING

    def free(unit):
        log.append(f"free {unit.name}")
        unit.state = SHARDED

    def of_the_unit(where):
        if where != FakeUnit.device:
            raise AnswerError(
                f"whose current stream it is: expected that of `unit.device`, got that of {where}\n"
                "likely slip: on a GPU the unit's last kernels are there: `device.current_stream(unit.device)`"
            )
        return current_stream(where)

    current_stream = device.current_stream
    pair = answer(gather, free, limit)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError("expected two functions, the limited gather and the limited free")
    other = device.new_stream(FakeUnit.device)
    with told(log), patch.object(device, "current_stream", of_the_unit):
        for verb, unit in program:
            if verb == "use":
                unit.state = UNSHARDED
            elif verb == "becomes root":
                unit.freed_after_forward = False
            elif verb == "free elsewhere":
                with device.on_stream(other):
                    pair[1](unit)
            else:
                pair[verb == "free"](unit)
    return log


def expected_log(limit, program):
    """The same by counting: of all frees so far at most `limit` - 1 may not have been waited for."""
    log, state, kept, frees, waited = [], {}, set(), 0, 0
    for verb, unit in program:
        whole = state.get(unit.name, False)
        if verb == "becomes root":
            kept.add(unit.name)
        if verb in ("use", "becomes root"):
            continue
        counts = unit.freed_after_forward and unit.name not in kept
        if verb == "gather":
            if not whole and counts:
                log += [f"wait for {number}" for number in range(waited + 1, frees - limit + 2)]
                waited = max(waited, frees - limit + 1)
            log.append(f"gather {unit.name}")
            state[unit.name] = True
        else:
            log.append(f"free {unit.name}")
            if whole and counts:
                frees += 1
                log.append(f"event {frees}")
            state[unit.name] = False
    return log


@check("8.6")
def check_rate_limit(answer, variant):
    """An event for every free of a unit that is freed after forward; a gather waits while `limit` are queued."""
    count = 4 + variant.size % 3
    units = [FakeUnit(str(number)) for number in range(count)]
    root, kept = FakeUnit("root", stays=True), FakeUnit("kept", stays=True)
    for limit in (1, 2, 3, 5):
        for each in (*units, root, kept):
            each.state = SHARDED
        plain = [(verb, unit) for unit in units for verb in ("gather", "use", "free")]
        check_limited(answer, limit, plain, f"units one after the other, limit {limit}")
        ahead = [("gather", units[0])]
        for unit, after in zip(units, [*units[1:], None], strict=True):
            ahead += [("gather", unit), ("use", unit)]  # gathered before: nothing to wait for
            ahead += [("gather", after)] if after is not None else []
            ahead += [("free", unit)]
        check_limited(answer, limit, ahead, f"each gathered while the one before computes, limit {limit}")
        stays = [("gather", root), ("use", root), *plain, ("gather", kept), ("use", kept), *plain]
        stays += [("free", kept), ("free", root), *plain]
        check_limited(answer, limit, stays, f"with units that stay unsharded, limit {limit}")
        again = [*plain, *[("free", unit) for unit in units], *plain]  # the engine frees everything at the end
        check_limited(answer, limit, again, f"all freed once more when backward ends, limit {limit}")
        together = [(verb, unit) for verb in ("gather", "use", "free") for unit in units[:3]] + plain
        check_limited(answer, limit, together, f"three freed one after the other, limit {limit}")
        same = [(verb, units[0]) for _ in range(4) for verb in ("gather", "use", "free")]
        check_limited(answer, limit, same, f"one unit, again and again, limit {limit}")
        lead = FakeUnit("late")
        late = [(verb, lead) for verb in ("gather", "becomes root", "use", "free", "gather", "use", "free")]
        check_limited(answer, limit, [*plain, *late, *plain], f"a root known after its gather, limit {limit}")
        unused = [step for step in plain if step[0] != "use"]
        check_limited(answer, limit, unused, f"gathered and freed without a use, limit {limit}")
        elsewhere = [(verb + " elsewhere" * (verb == "free"), unit) for verb, unit in plain]
        check_limited(answer, limit, elsewhere, f"freed while another stream is current, limit {limit}")
        every_other = [
            (verb + " elsewhere" * (verb == "free" and number // 3 % 2), unit)
            for number, (verb, unit) in enumerate(plain)
        ]
        check_limited(
            answer, limit, every_other, f"every other one freed while another stream is current, limit {limit}"
        )


def check_limited(answer, limit, program, what):
    states = {id(unit): unit.state for _, unit in program}
    wanted = expected_log(limit, program)
    try:
        got = limited_log(answer, limit, program)
    except IndexError as error:
        raise AnswerError(
            f"{what}: {error}\nlikely slip: there is no free to wait for: check the length of the queue first"
        ) from error
    for _, unit in program:
        unit.state = states[id(unit)]
    plain = [each.replace("event", "free's event") for each in got]
    if normal(got) == normal(wanted):
        return
    raise AnswerError(f"{what}: {first_difference(plain, wanted)}\nlikely slip: {why_limited(got, wanted, what)}")


def normal(log):
    """A log in which an event recorded just before its free counts as one just after: a free queues no kernel."""
    log = list(log)
    for at in range(len(log) - 1):
        own = not log[at - 1].startswith("free") if at else True  # else it is the event of the free before it
        if own and log[at].startswith("event") and log[at + 1].startswith("free"):
            log[at], log[at + 1] = log[at + 1], log[at]
    return log


def first_difference(got, wanted):
    wanted = [each.replace("event", "free's event") for each in wanted]
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    before = f"after `{wanted[at - 1]}` " if at else ""
    expected = f"`{wanted[at]}`" if at < len(wanted) else "nothing more"
    found = f"`{got[at]}`" if at < len(got) else "nothing more"
    return f"{before}expected {expected}, got {found}"


def why_limited(got, wanted, what):
    """The slip behind a wrong log."""

    def of(log, word):
        return [each for each in log if each.startswith(word)]

    if of(got, "gather") != of(wanted, "gather") or of(got, "free") != of(wanted, "free"):
        return "pass every call on to `gather` and `free`, whatever else is done"
    if "known after" in what:
        return "it is known late which unit is the root: read `unit.freed_after_forward` at each call"
    if "again and again" in what and len(of(got, "wait")) < len(of(wanted, "wait")):
        return "a unit is freed twice in a step, and more often in several: each free has an event of its own"
    waits, right = of(got, "wait"), of(wanted, "wait")
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(wanted))
    if got[-1].startswith("wait"):
        return "the host waits when a unit is about to be gathered; after a free it goes on"
    if any(ELSEWHERE in each for each in got):
        return "the unit's last kernels are on the stream that is current at its free: ask for it then"
    if len(of(got, "event")) > len(of(wanted, "event")):
        if "stay unsharded" in what:
            return "units that stay unsharded do not count: they are freed much later, and no gather needs their memory"
        return "`free` of a unit that is sharded already frees nothing: no event for it"
    if "without a use" in what:
        return "a unit whose gather is in progress is not sharded: freeing it frees memory, too"
    if not of(got, "event"):
        return "after a free an event has to be recorded, or there is nothing to wait for"
    if not waits:
        return "the host never waits: before a gather it has to wait for the oldest of `limit` frees"
    if got[at : at + 2] == wanted[at : at + 2][::-1] and wanted[at].startswith("wait"):
        return "wait first, then issue the gather: otherwise it finds no free memory"
    following = next((each for each in got[at:] if not each.startswith("wait")), "")
    if following in ("gather root", "gather kept") and got[at].startswith("wait"):
        return "gathering a unit that stays unsharded is no reason to wait"
    if "wait for None" in waits:
        return "the events to wait for are those recorded at the frees"
    if any("wait" in each for each in got[:4]) or len(waits) > len(set(waits)):
        return "remove an event from the queue once the host has waited for it"
    numbers = [int(each.split()[-1]) for each in waits]
    oldest = [int(each.split()[-1]) for each in right]
    if set(oldest) < set(numbers) and len(numbers) > len(oldest):
        if "while the one before" in what:
            return "a unit that is gathered already needs no room, so the host does not wait"
        return "the host waits for more than it must: fewer than `limit` frees may stay ahead of the device"
    if set(numbers) < set(oldest) and "three" in what:
        return "more than one event may have to leave the queue: wait as long as there are `limit` or more"
    if set(numbers) < set(oldest):
        return "one unit too many: the host has to wait as soon as `limit` frees are ahead of the device"
    return "the host waits for the oldest free, which is the first to happen: a queue, first in, first out"


# 8.7


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


# 8.8


@check("8.8")
def check_largest_limit(answer, variant):
    """The largest k whose heaviest moment fits, to the byte; a ValueError if not even one unit does."""
    generator = torch.Generator().manual_seed(80 + variant.seed)
    count = 5 + variant.size % 3
    cases: list[Case] = []
    for spread in (0, 60, 120, 400):
        blocks = [4 * int(x) for x in torch.randint(20, 400, (count,), generator=generator)]
        held = [4 * int(x) for x in torch.randint(800, 801 + spread, (count,), generator=generator)]
        peaks = [peak_with(k, blocks, held) for k in range(1, count + 1)]
        budgets = sorted({near for peak in peaks for near in (peak - 1, peak, peak + 1)} | {10**9})
        cases += [Case(budget, blocks, held, peaks) for budget in budgets]
    gib = 2**30
    large = [(3 * gib + 4, 3 * gib, 3 * gib, 3 * gib), (40 * gib, 40 * gib + 4, 40 * gib, 40 * gib)]
    for blocks, held in (large, ([12], [100]), ([5] * 12, [0] * 12)):
        peaks = [peak_with(k, blocks, held) for k in range(1, len(blocks) + 1)]
        cases += [Case(peak + near, list(blocks), list(held), peaks) for peak in peaks for near in (-1, 0, 1)]
    for blocks, held in (([10, 1, 1], [100, 0, 0]), ([10, 10, 10], [90, 91, 10])):  # the heaviest moment is early
        peaks = [peak_with(k, blocks, held) for k in (1, 2, 3)]
        cases += [Case(budget, blocks, held, peaks) for budget in range(min(peaks) - 14, max(peaks) + 2)]
    got = [limit_of(answer, case) for case in cases]
    wanted = [largest(case, lambda k, case=case: case.peaks[k - 1]) for case in cases]
    if got == [limit or "ValueError" for limit in wanted]:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != (b or "ValueError"))
    case, right = cases[at], wanted[at] or "ValueError"
    slip = why_limit([0 if limit == "ValueError" else limit for limit in got], wanted, cases)
    if case.budget > 2**30:
        slip = "bytes of a GPU need more than the 24 bits of float32 and the 32 of an int32: Python's int is exact"
    raise AnswerError(
        f"{case.budget:,} bytes, and peaks of {', '.join(f'{peak:,}' for peak in case.peaks)} with limits 1, 2, ...: "
        f"expected {right}, got {got[at]!r}" + (f"\nlikely slip: {slip}" if slip else "")
    )


class Case(NamedTuple):
    budget: int
    blocks: list[int]
    held: list[int]
    peaks: list[int]


def peak_with(k, blocks, held):
    """By a running sum, which is not how one would write it down."""
    totals = [0]
    for block in blocks:
        totals.append(totals[-1] + block)
    return max(held[j] + totals[j + 1] - totals[max(0, j + 1 - k)] for j in range(len(blocks)))


def limit_of(answer, case):
    blocks, held = list(case.blocks), list(case.held)
    try:
        limit = answer(case.budget, blocks, held)
    except ValueError:
        limit = "ValueError"
    slip = "the lists belong to the caller, who may need them again: use `reversed`, not `reverse`"
    expect("`blocks` and `held` afterwards", [blocks, held], [case.blocks, case.held], slip=slip)
    return limit


def largest(case, peak):
    """The largest k whose `peak(k)` fits; 0 if there is none."""
    return max([k for k in range(1, len(case.blocks) + 1) if peak(k) <= case.budget], default=0)


def why_limit(got, wanted, cases):
    """The slip that gives all of these limits."""

    def all_with(peak):
        return [largest(case, lambda k, case=case: peak(k, *case[1:3])) for case in cases]

    def runs(k, blocks):
        return [sum(blocks[i : i + k]) for i in range(len(blocks) - k + 1)]

    slips = {
        "at least one unit has to fit: raise ValueError if it does not": wanted,
        "the heaviest blocks are not unsharded at one time unless they are neighbours": all_with(
            lambda k, blocks, held: max(held) + sum(sorted(blocks)[-k:])
        ),
        "the largest `held` and the heaviest run of blocks belong to different moments: add what is there at one": (
            all_with(lambda k, blocks, held: max(held) + max(runs(k, blocks)))
        ),
        "backward goes towards block 0: next to block j, blocks j - 1, j - 2, ... are gathered ahead": all_with(
            lambda k, blocks, held: max(held[j] + sum(blocks[j : j + k]) for j in range(len(blocks)))
        ),
        "there is no block before block 0: a slice that begins below 0 is counted from the end, and is empty": all_with(
            lambda k, blocks, held: max(held[j] + sum(blocks[j - k + 1 : j + 1]) for j in range(len(blocks)))
        ),
        "near block 0 fewer than k blocks are unsharded, and these moments count too": all_with(
            lambda k, blocks, held: max(
                held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(k - 1, len(blocks))
            )
        ),
        "`held` has to fit as well": all_with(lambda k, blocks, held: max(runs(k, blocks))),
        "each block's moment counts, and the heaviest of them has to fit, not the last": all_with(
            lambda k, blocks, held: held[-1] + sum(blocks[-k:])
        ),
        "that is one more than fits": [
            min(len(case.blocks), w + (w > 0)) for w, case in zip(wanted, cases, strict=True)
        ],
        "exactly as many bytes as the budget are within it": all_with(lambda k, *sizes: peak_with(k, *sizes) + 1),
    }
    return next((text for text, limits in slips.items() if limits == got), None)
