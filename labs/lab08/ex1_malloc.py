"""Exercise 8.1: malloc."""

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine.allocator import CachingAllocator

from .shared import ROUND, SEGMENT, Block, FakeDevice, FakeEvent, Memory, free_of, memory_of, place


@reference(
    "8.1",
    hints=(
        "Three questions in turn: which free blocks may serve this stream and are large enough, and which of them is "
        "the smallest? If none: does the device have a segment? Then: is something left over?",
        "`size = -(-nbytes // ROUND) * ROUND`; `min(fitting, key=lambda block: block.size)` if there are any, and off "
        "`memory.free` with it; else `memory.device.new_segment(...)`, entered in `memory.segments`, a `Block` over "
        "all of it. To split: `Block(block.start + size, block.size - size, stream)` goes on "
        "`memory.free`, then `block.size = size`.",
    ),
    forbids=(CachingAllocator.malloc, CachingAllocator._take, CachingAllocator._split, CachingAllocator._new_segment),
)
def malloc(memory: Memory, nbytes: int, stream: int) -> Block | None:
    """Return a block for a stream's request of `nbytes` bytes (at least 1), or None if the device is full.

    The block's size is `nbytes` rounded up to a multiple of ROUND. Cut it from the beginning of the smallest block on
    `memory.free` that belongs to the same stream and is large enough. Remove that block from the list, and put any
    remainder on the list as a block of the same stream. If no block fits, call `memory.device.new_segment(...)` with
    the size rounded up to a multiple of SEGMENT, enter the segment in `memory.segments`, and cut it in the same way. If
    that call returns None, return None and leave `memory` unchanged.
    """
    size = -(-nbytes // ROUND) * ROUND
    fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
    if fitting:
        block = min(fitting, key=lambda each: each.size)
        memory.free.remove(block)
    else:
        whole = -(-size // SEGMENT) * SEGMENT
        start = memory.device.new_segment(whole)
        if start is None:
            return None
        memory.segments[start] = whole
        block = Block(start, whole, stream)
    if block.size > size:
        memory.free.append(Block(block.start + size, block.size - size, stream))
        block.size = size
    return block


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
        memory.waiting.append((Block(99 * SEGMENT, middle, stream), [FakeEvent([], 4)]))
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
    waiting = [(Block(99 * SEGMENT, 2 * SEGMENT, 1), [FakeEvent([], 4)])]
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
