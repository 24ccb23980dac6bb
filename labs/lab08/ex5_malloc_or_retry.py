"""Exercise 8.5: Out of memory."""

from collections.abc import Callable

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine.allocator import CachingAllocator

from .shared import ROUND, SEGMENT, Block, Memory, memory_of


@reference(
    "8.5",
    hints=(
        "After `memory.device.synchronize()` every event has happened, so all that waits can come back; only then do "
        "you know which segments are free from end to end.",
        "On None: count, synchronize, put back and empty `memory.waiting`; for each free block with "
        "`memory.segments.get(block.start) == block.size`: off `memory.free`, out of `memory.segments`, "
        "`memory.device.give_back(block.start)`. Then `malloc` once more, and MemoryError if that gives None.",
    ),
    forbids=(CachingAllocator._flush,),
)
def malloc_or_retry(
    memory: Memory,
    nbytes: int,
    stream: int,
    malloc: Callable[[Memory, int, int], Block | None],
    put_back: Callable[[Memory, Block], None],
) -> Block:
    """Return a block for a request; if there is none, wait for the device and retry once.

    Args:
        memory, nbytes, stream: as for `malloc`.
        malloc, put_back: your functions from 8.1 and 8.2.

    Only if `malloc` returns None, count a retry in `memory.retries`; call `memory.device.synchronize()`; put back all
    waiting blocks, which empties `memory.waiting`; return every segment that is entirely free with
    `memory.device.give_back(start)`, and remove it from `memory.free` and `memory.segments`; call `malloc` once more.

    Raises:
        MemoryError: if there is no room even then.
    """
    block = malloc(memory, nbytes, stream)
    if block is None:
        memory.retries += 1
        memory.device.synchronize()
        while memory.waiting:
            put_back(memory, memory.waiting.pop()[0])
        for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
            memory.free.remove(free)
            del memory.segments[free.start]
            memory.device.give_back(free.start)
        block = malloc(memory, nbytes, stream)
    if block is None:
        raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
    return block


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
