"""The caching allocator on paper: rule by rule as torch's (c10/cuda/CUDACachingAllocator.cpp), then at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minifsdp.instruments.machine import Block, CachingAllocator, DeviceMemoryError

KIB, MIB = 2**10, 2**20
HERE, THERE, ELSEWHERE = 0, 1, 2  # streams


@dataclass(eq=False)
class Event:
    stream: int
    happened: bool = False


@dataclass
class Device:
    """Its streams get on when a test says so."""

    events: list[Event] = field(default_factory=list)
    log: list[str | tuple[str, int]] = field(default_factory=list)

    def record(self, stream: int) -> Event:
        self.events.append(Event(stream))
        return self.events[-1]

    def happened(self, event: Event) -> bool:
        return event.happened

    def synchronize(self) -> None:
        self.log.append("synchronize")
        for event in self.events:
            event.happened = True

    def cuda_malloc(self, nbytes: int) -> None:
        self.log.append(("malloc", nbytes))

    def cuda_free(self, nbytes: int) -> None:
        self.log.append(("free", nbytes))

    def reach(self, stream: int) -> None:
        """The stream has done all that is queued on it."""
        for event in self.events:
            event.happened |= event.stream == stream


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def allocator(device: Device) -> CachingAllocator:
    return CachingAllocator(2**40, device)


def blocks(allocator: CachingAllocator) -> list[tuple[int, str]]:
    return [(block.size, block.state) for segment in allocator.snapshot() for block in segment.blocks]


# Sizes


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (3 * KIB, 3 * KIB)])
def test_round_size_every_block_is_a_multiple_of_512_bytes(asked: int, given: int, allocator: CachingAllocator) -> None:
    block = allocator.malloc(asked, HERE)
    assert (block.size, block.requested) == (given, asked)
    assert allocator.allocated == allocator.active == given


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # it is the rounded size that counts
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (37 * MIB, 38 * MIB),
    ],
)
def test_get_allocation_size_segments_of_2_mib_of_20_or_of_ones_own_size(
    asked: int, segment: int, allocator: CachingAllocator, device: Device
) -> None:
    allocator.malloc(asked, HERE)
    assert device.log == [("malloc", segment)]
    assert allocator.reserved == segment


@pytest.mark.parametrize(("left", "split"), [(0, False), (512, True)])
def test_should_split_a_small_block_if_512_bytes_are_left(left: int, split: bool, allocator: CachingAllocator) -> None:
    allocator.malloc(MIB, HERE)
    block = allocator.malloc(MIB - left, HERE)
    assert block.size == MIB - left
    assert blocks(allocator)[2:] == [(left, "free")] * split


@pytest.mark.parametrize(("left", "split"), [(MIB, False), (MIB + 512, True)])
def test_should_split_a_large_block_if_more_than_1_mib_is_left(
    left: int, split: bool, allocator: CachingAllocator
) -> None:
    allocator.malloc(9 * MIB, HERE)
    block = allocator.malloc(11 * MIB - left, HERE)
    assert block.size == 11 * MIB - left * split
    assert blocks(allocator)[2:] == [(left, "free")] * split


# Choice


def test_get_free_block_the_smallest_that_is_large_enough_then_the_lowest_address(allocator: CachingAllocator) -> None:
    sizes = [64, 32, 48, 32, 64]
    held = []
    for kib in sizes:
        held += [allocator.malloc(kib * KIB, HERE), allocator.malloc(512, HERE)]  # a wall after each
    starts = [block.start for block in held[::2]]
    for block in held[::2]:
        allocator.free(block)
    for kib, expected in [(40, 2), (32, 1), (32, 3), (20, 0)]:
        assert allocator.malloc(kib * KIB, HERE).start == starts[expected], f"{kib} KiB"


def test_get_pool_what_one_stream_freed_another_does_not_get(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(4 * MIB, HERE))
    allocator.malloc(4 * MIB, THERE)
    assert allocator.reserved == 40 * MIB
    assert [segment.stream for segment in allocator.snapshot()] == [HERE, THERE]


def test_get_pool_small_requests_do_not_cut_large_segments(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(4 * MIB, HERE))
    allocator.malloc(MIB, HERE)
    assert [(segment.size, segment.small) for segment in allocator.snapshot()] == [(20 * MIB, False), (2 * MIB, True)]


def test_free_on_its_own_stream_is_at_once_kernels_queued_or_not(allocator: CachingAllocator, device: Device) -> None:
    block = allocator.malloc(4 * MIB, HERE)
    allocator.free(block)
    assert device.events == []
    assert allocator.malloc(4 * MIB, HERE).start == block.start


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_try_merge_blocks_free_neighbours_become_one(order: tuple[int, ...], allocator: CachingAllocator) -> None:
    held = [allocator.malloc(600 * KIB, HERE) for _ in range(3)]
    for index in order:
        allocator.free(held[index])
    assert blocks(allocator) == [(2 * MIB, "free")]
    assert allocator.fragmented == 0


def test_alloc_found_block_what_a_split_leaves_is_a_neighbour_of_both_sides(allocator: CachingAllocator) -> None:
    _, middle, right = (allocator.malloc(600 * KIB, HERE) for _ in range(3))
    allocator.free(middle)
    allocator.malloc(400 * KIB, HERE)
    allocator.free(right)
    assert [size for size, state in blocks(allocator) if state == "free"] == [2 * MIB - 1000 * KIB]


# Streams and events


def test_record_stream_of_the_blocks_own_stream_is_ignored(allocator: CachingAllocator, device: Device) -> None:
    block = allocator.malloc(MIB, HERE)
    allocator.record_stream(block, HERE)
    allocator.free(block)
    assert device.events == []
    assert allocator.active == 0


def test_insert_events_a_freed_block_waits_for_the_streams_recorded_on_it(
    allocator: CachingAllocator, device: Device
) -> None:
    block = allocator.malloc(4 * MIB, HERE)
    for stream in (THERE, ELSEWHERE, THERE):
        allocator.record_stream(block, stream)
    assert device.events == []
    allocator.free(block)
    assert [event.stream for event in device.events] == [THERE, ELSEWHERE]
    assert (allocator.allocated, allocator.active) == (0, 4 * MIB)

    other = allocator.malloc(4 * MIB, HERE)
    device.reach(ELSEWHERE)
    another = allocator.malloc(4 * MIB, HERE)
    assert len({block.start, other.start, another.start}) == 3
    device.reach(THERE)
    assert allocator.active == 12 * MIB, "nobody has looked yet"
    assert allocator.malloc(4 * MIB, HERE).start == block.start


def test_process_events_as_far_as_a_stream_has_got(allocator: CachingAllocator, device: Device) -> None:
    held = [allocator.malloc(4 * MIB, HERE) for _ in range(3)]
    for block, stream in zip(held, (THERE, THERE, ELSEWHERE), strict=True):
        allocator.record_stream(block, stream)
        allocator.free(block)
    device.events[0].happened = device.events[2].happened = True
    allocator.collect()
    assert blocks(allocator) == [(4 * MIB, "free"), (4 * MIB, "waiting"), (12 * MIB, "free")]


def test_try_merge_blocks_not_with_one_that_waits(allocator: CachingAllocator, device: Device) -> None:
    left, middle = allocator.malloc(MIB, HERE), allocator.malloc(MIB, HERE)
    allocator.record_stream(middle, THERE)
    allocator.free(middle)
    allocator.free(left)
    assert blocks(allocator) == [(MIB, "free"), (MIB, "waiting")]
    device.reach(THERE)
    allocator.collect()
    assert blocks(allocator) == [(2 * MIB, "free")]


def test_a_block_that_is_used_again_waits_for_its_new_users_only(allocator: CachingAllocator, device: Device) -> None:
    block = allocator.malloc(2 * MIB, HERE)
    allocator.record_stream(block, THERE)
    allocator.free(block)
    device.reach(THERE)
    again = allocator.malloc(2 * MIB, HERE)
    assert again.start == block.start
    allocator.free(again)
    assert len(device.events) == 1
    assert allocator.active == 0


# No memory


def test_release_cached_blocks_whole_segments_go_back_after_a_synchronization() -> None:
    device = Device()
    allocator = CachingAllocator(64 * MIB, device)
    whole = [allocator.malloc(20 * MIB, stream) for stream in (HERE, THERE)]
    piece, kept = allocator.malloc(4 * MIB, HERE), allocator.malloc(4 * MIB, HERE)
    for block in (*whole, piece):
        allocator.free(block)
    device.log.clear()
    large = allocator.malloc(30 * MIB, HERE)
    assert device.log == ["synchronize", ("free", 20 * MIB), ("free", 20 * MIB), ("malloc", 30 * MIB)]
    assert allocator.retries == 1
    assert allocator.reserved == 50 * MIB
    assert allocator.fragmented == 16 * MIB, "beside the block in use, and too small for the request"
    assert large.start not in (block.start for block in (*whole, piece, kept))


def test_synchronize_and_free_events_what_waits_is_given_back_too() -> None:
    device = Device()
    allocator = CachingAllocator(40 * MIB, device)
    block = allocator.malloc(30 * MIB, HERE)
    allocator.record_stream(block, THERE)
    allocator.free(block)
    allocator.malloc(30 * MIB, HERE)
    assert allocator.retries == 1
    assert allocator.reserved == allocator.active == 30 * MIB
    device.events.clear()
    allocator.collect()  # its event is not asked for twice
    assert allocator.active == 30 * MIB


def test_no_retry_while_a_cached_block_fits() -> None:
    allocator = CachingAllocator(40 * MIB, Device())
    allocator.free(allocator.malloc(30 * MIB, HERE))
    for _ in range(3):
        allocator.free(allocator.malloc(29 * MIB, HERE))
    assert allocator.retries == 0


def test_out_of_memory_is_an_error_after_a_retry_and_does_no_harm() -> None:
    device = Device()
    allocator = CachingAllocator(64 * MIB, device)
    held = allocator.malloc(40 * MIB, HERE)
    allocator.free(allocator.malloc(20 * MIB, THERE))
    with pytest.raises(DeviceMemoryError, match=r"30\.0 MiB: of 64\.0 MiB 40\.0 are allocated and 0\.0 reserved"):
        allocator.malloc(30 * MIB, HERE)
    assert allocator.retries == 1
    assert allocator.allocated == allocator.active == allocator.reserved == 40 * MIB
    assert allocator.malloc(24 * MIB, HERE).size == 24 * MIB
    allocator.free(held)
    assert allocator.malloc(30 * MIB, HERE).start == held.start


# To look at


def test_snapshots_of_the_peak_and_before_the_first_retry() -> None:
    allocator = CachingAllocator(44 * MIB, Device())
    first, second = allocator.malloc(20 * MIB, HERE), allocator.malloc(4 * MIB, THERE)
    allocator.record_stream(first, THERE)
    allocator.free(first)
    allocator.malloc(10 * MIB, HERE)
    allocator.malloc(30 * KIB, HERE)
    before = allocator.snapshots["first retry"]
    assert [[block.state for block in segment.blocks] for segment in before] == [["waiting"], ["in use", "free"]]
    most = allocator.snapshots["peak of reserved"]
    assert sum(segment.size for segment in most) == 40 * MIB
    assert second.size == 4 * MIB
    assert [segment.size for segment in allocator.snapshot()] == [20 * MIB, 10 * MIB, 2 * MIB]


def test_fragmented_is_what_is_free_in_segments_that_are_split(allocator: CachingAllocator) -> None:
    one, two = allocator.malloc(MIB, HERE), allocator.malloc(MIB, HERE)
    assert allocator.fragmented == 0
    allocator.free(one)
    assert allocator.fragmented == MIB
    allocator.malloc(256 * KIB, HERE)
    assert allocator.fragmented == 768 * KIB
    allocator.free(two)
    assert allocator.fragmented == 2 * MIB - 256 * KIB


# Whatever happens


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 24).map(lambda mib: mib * MIB))
STREAMS = st.sampled_from([HERE, THERE, ELSEWHERE])


class Allocations(RuleBasedStateMachine):
    """Programs of several streams; what is alive, and what a stream may still use, is kept here independently."""

    @initialize(capacity=st.integers(24, 96))
    def begin(self, capacity: int) -> None:
        self.device = Device()
        self.capacity = capacity * MIB
        self.allocator = CachingAllocator(self.capacity, self.device)
        self.live: list[Block] = []
        self.recorded: dict[Block, set[int]] = {}
        self.freed: list[tuple[int, int, list[Event]]] = []  # start, end, and what its users have still to reach

    @rule(nbytes=SIZES, stream=STREAMS)
    def malloc(self, nbytes: int, stream: int) -> None:
        allocator = self.allocator
        allocator.collect()
        size, retries = max(512, -(-nbytes // 512) * 512), allocator.retries
        pool = [s for s in allocator.snapshot() if s.stream == stream and s.small == (size <= MIB)]
        fits = [b for s in pool for b in s.blocks if b.state == "free" and b.size >= size]
        segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        room = allocator.reserved + segment <= self.capacity
        try:
            block = allocator.malloc(nbytes, stream)
        except DeviceMemoryError:
            assert not fits
            assert not room
            assert allocator.reserved + segment > self.capacity
            assert all(len(s.blocks) > 1 or s.blocks[0].state == "in use" for s in allocator.snapshot())
        else:
            assert (block.stream, block.requested) == (stream, nbytes)
            assert size <= block.size <= size + MIB
            if fits:
                assert block.start == min((b.size, b.start) for b in fits)[1]
            self.live.append(block)
            self.recorded[block] = set()
        assert allocator.retries - retries == (not fits and not room)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=STREAMS)
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        block = data.draw(st.sampled_from(self.live))
        self.allocator.record_stream(block, stream)
        self.recorded[block].add(stream)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.sampled_from(self.live)))

    @rule(stream=STREAMS)
    def reach(self, stream: int) -> None:
        self.device.reach(stream)

    @rule()
    def free_everything(self) -> None:
        for block in list(self.live):
            self.let_go(block)
        for stream in (HERE, THERE, ELSEWHERE):
            self.device.reach(stream)
        self.allocator.collect()
        assert self.allocator.active == self.allocator.fragmented == 0
        assert all([block.state for block in segment.blocks] == ["free"] for segment in self.allocator.snapshot())

    def let_go(self, block: Block) -> None:
        start, end, before = block.start, block.start + block.size, len(self.device.events)
        self.allocator.free(block)
        self.live.remove(block)
        events = self.device.events[before:]
        assert {event.stream for event in events} == self.recorded.pop(block) - {block.stream}
        self.freed.append((start, end, events))

    @invariant()
    def no_two_use_the_same_memory(self) -> None:
        self.freed = [each for each in self.freed if not all(event.happened for event in each[2])]
        used = sorted([(b.start, b.start + b.size) for b in self.live] + [(start, end) for start, end, _ in self.freed])
        assert all(before[1] <= after[0] for before, after in pairwise(used))

    @invariant()
    def counters_are_sums_over_blocks(self) -> None:
        allocator, segments = self.allocator, self.allocator.snapshot()
        sizes = dict.fromkeys(("in use", "waiting", "free"), 0)
        for segment in segments:
            assert sum(block.size for block in segment.blocks) == segment.size
            at = segment.start
            for block in segment.blocks:
                assert block.start == at
                assert (block.stream, block.small) == (segment.stream, segment.small)
                sizes[block.state] += block.size
                at += block.size
            states = [block.state for block in segment.blocks]
            assert all({"free"} != {one, other} for one, other in pairwise(states)), "neighbours that are not merged"
        split = [block for segment in segments if len(segment.blocks) > 1 for block in segment.blocks]
        assert allocator.allocated == sizes["in use"] == sum(block.size for block in self.live)
        assert allocator.active == allocator.allocated + sizes["waiting"]
        assert allocator.reserved == sum(segment.size for segment in segments)
        assert allocator.fragmented == sum(block.size for block in split if block.state == "free")
        assert allocator.allocated <= allocator.active <= allocator.reserved <= self.capacity


Allocations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocations = Allocations.TestCase
