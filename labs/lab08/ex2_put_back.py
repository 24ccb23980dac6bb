"""Exercise 8.2: Put back."""

from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine.allocator import CachingAllocator

from .shared import ROUND, SEGMENT, Block, FakeEvent, Memory, free_of, memory_of, place


@reference(
    "8.2",
    hints=(
        "Segments never touch, so of two free blocks of which one ends where the other begins both are of one segment. "
        "There can be one on either side.",
        "For each of `list(memory.free)`: if `other.start + other.size == block.start` or "
        "`block.start + block.size == other.start`, remove `other` from `memory.free`, set `block.start` to the "
        "smaller start and add its size. Then append the block.",
    ),
    forbids=(CachingAllocator._put, CachingAllocator._merge),
)
def put_back(memory: Memory, block: Block) -> None:
    """Put a block on `memory.free`, merged with the free neighbours before and after it.

    Neighbours are blocks on `memory.free`; blocks on `memory.waiting` are not free. The merged block begins where the
    first of the merged blocks began, and its size is the sum of their sizes. Remove these blocks from the list. You may
    change `block` itself or put a new `Block` on the list.
    """
    for other in list(memory.free):
        if other.start + other.size == block.start or block.start + block.size == other.start:
            memory.free.remove(other)
            block.start = min(block.start, other.start)
            block.size += other.size
    memory.free.append(block)


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
            memory.waiting.append((each, [FakeEvent([], 2)]))
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
