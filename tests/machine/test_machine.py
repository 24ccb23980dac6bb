"""The GPU on paper: times and hazards of small programs, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minifsdp.comm import Call
from minifsdp.instruments.machine import A100, Block, CachingAllocator, DeviceMemoryError, Program, Run, replay
from minifsdp.instruments.machine.hardware import Measured
from minifsdp.instruments.machine.hazards import Hazards
from minifsdp.instruments.machine.program import (
    COMPUTE,
    DEVICE,
    Allocate,
    Buffer,
    Free,
    Instruction,
    Issue,
    Kernel,
    Mark,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)
from minifsdp.instruments.machine.queues import Queues

MIB = 2**20
SIDE, OTHER = 1, 2  # streams beside the compute stream
AHEAD = Measured(
    "paper", {}, 1.0, 2**40, latency=1.0, bandwidth=1.0, launch=0.0, issue=0.0, segment=(0.0, 0.0), runs_ahead=True
)
"""Kernels take what they say, a message 1 second and what it carries; the host takes no time."""

ON_CPU = replace(AHEAD, runs_ahead=False)


def kernel(seconds: float, stream: int = COMPUTE, reads: Any = (), writes: Any = ()) -> Kernel:
    return Kernel("kernel", "unit", stream, tuple(reads), tuple(writes), 0.0, 0, 4, seconds)


def message(order: int, seconds: float = 2.0) -> Call:
    """A gather that takes as long, latency included, between two ranks."""
    return Call("all_gather", "all_gather_single", "group", order, int(2 * (seconds - 1)), 2)


def issue(call: Call, stream: int = SIDE, reads: Any = (), writes: Any = ()) -> Issue:
    return Issue(call, "unit", stream, tuple(reads), tuple(writes))


def run(*instructions: Instruction, on: Measured = AHEAD, sizes: Any = (), **kwargs: Any) -> Run:
    """Replay instructions; buffer i has sizes[i] bytes, or 4 MiB."""
    numbers = {each.buffer for each in instructions if isinstance(each, Allocate)}
    sizes = dict.fromkeys(numbers, 4 * MIB) | dict(enumerate(sizes))
    buffers = {n: Buffer(f"buffer {n}", size, "unsharded", f"unit {n}") for n, size in sizes.items()}
    return replay(Program(list(instructions), buffers), on, **kwargs)


def times(ran: Run, lane: str = "compute") -> list[tuple[float, float]]:
    """Begin and end of what ran, in order of issue."""
    return [(span.start, span.end) for span in ran.spans if span.lane.startswith(lane)]


# Streams and the host


def test_a_stream_runs_one_kernel_after_the_other_and_streams_run_side_by_side() -> None:
    ran = run(kernel(2), kernel(4, SIDE), kernel(3), kernel(1, SIDE))
    assert times(ran) == [(0, 2), (0, 4), (2, 5), (4, 5)]
    assert [span.lane for span in ran.spans] == ["compute", "compute (stream 1)"] * 2
    assert ran.done == 5


def test_a_host_that_is_slower_than_its_device_sets_the_pace() -> None:
    ran = run(kernel(1), kernel(1), kernel(1), on=replace(AHEAD, launch=3.0))
    assert times(ran) == [(3, 4), (6, 7), (9, 10)]


def test_a_host_that_is_faster_runs_ahead() -> None:
    ran = run(kernel(5), kernel(5), Mark("queued"), on=replace(AHEAD, launch=1.0))
    assert times(ran) == [(1, 6), (6, 11)]
    assert (ran.marks[0].host, ran.marks[0].done) == (2, 11)


def test_a_stream_waits_for_what_was_queued_before_the_event() -> None:
    ran = run(kernel(2), Record(7, COMPUTE), kernel(9), WaitEvent(7, SIDE), kernel(1, SIDE))
    assert times(ran) == [(0, 2), (2, 11), (2, 3)]


def test_an_event_that_nobody_recorded_is_past() -> None:
    assert times(run(kernel(2), WaitEvent(7, SIDE), kernel(1, SIDE), Synchronize(8), kernel(1))) == [
        (0, 2),
        (0, 1),
        (2, 3),
    ]


def test_a_host_that_synchronizes_stands_still_until_the_event() -> None:
    """What a rate limiter does: nothing is queued in the meantime, on whatever stream."""
    ran = run(kernel(4), Record(0, COMPUTE), kernel(4), Synchronize(0), kernel(1, SIDE), Mark("after"))
    assert times(ran) == [(0, 4), (4, 8), (4, 5)]
    assert times(ran, "wait") == [(0, 4)]
    assert ran.marks[0].host == 4


def test_a_value_is_waited_for_on_the_compute_stream_alone() -> None:
    ran = run(kernel(3), issue(message(0, 9)), kernel(8, SIDE), Synchronize(None), Mark("item"))
    assert ran.marks[0].host == 3
    assert ran.done == 9


def test_the_whole_device_is_waited_for_on_every_queue() -> None:
    ran = run(kernel(3), issue(message(0, 9)), kernel(8, SIDE), Synchronize(DEVICE), Mark("synchronized"))
    assert ran.marks[0].host == 9


def test_where_the_host_is_the_compute_it_is_never_ahead() -> None:
    ran = run(kernel(2), issue(message(0, 5), COMPUTE), kernel(3), Wait(message(0, 5), COMPUTE), kernel(1), on=ON_CPU)
    assert times(ran) == [(0, 2), (2, 5), (7, 8)]
    assert times(ran, "communication") == [(2, 7)]
    assert times(ran, "wait") == [(5, 7)]
    assert ran.overlap == pytest.approx(3 / 5)


# The link


def test_messages_go_one_at_a_time_on_whichever_stream_they_were_issued() -> None:
    ran = run(issue(message(0, 3)), issue(message(1, 2), OTHER), Wait(message(1, 2), COMPUTE), kernel(1))
    assert times(ran, "communication") == [(0, 3), (3, 5)]
    assert times(ran) == [(5, 6)]


def test_a_message_begins_when_its_stream_has_come_to_it_and_those_behind_it_wait_too() -> None:
    ran = run(kernel(4), issue(message(0), COMPUTE), issue(message(1), SIDE))
    assert times(ran, "communication") == [(4, 6), (6, 8)]


def test_a_message_does_not_hold_up_its_stream_until_it_is_waited_for() -> None:
    ran = run(issue(message(0, 5), COMPUTE), kernel(2), Wait(message(0, 5), COMPUTE), kernel(2))
    assert times(ran) == [(0, 2), (5, 7)]
    assert ran.overlap == pytest.approx(2 / 5)


def test_issuing_takes_the_host_time() -> None:
    ran = run(issue(message(0)), issue(message(1)), on=replace(AHEAD, issue=4.0))
    assert times(ran, "communication") == [(4, 6), (8, 10)]


# Memory


def test_segments_take_the_host_time_and_a_retry_waits_for_the_device() -> None:
    gib = replace(AHEAD, capacity=40 * MIB, segment=(1.0, 0.0))
    steps = [Allocate(0, COMPUTE), kernel(10, COMPUTE, (), (0,)), Free(0), Allocate(1, SIDE), Mark("has it")]
    ran = run(*steps, on=gib, sizes=(30 * MIB, 20 * MIB))
    assert ran.retries == 1
    assert times(ran, "wait") == [(0, 1), (1, 11), (11, 12), (12, 13)]
    assert [span.name for span in ran.spans if span.lane == "wait"] == [
        "cudaMalloc",
        "host waits",
        "cudaFree",
        "cudaMalloc",
    ]
    assert ran.marks[0].host == ran.retries_at[0] == 13
    assert set(ran.snapshots) == {"peak of reserved", "first retry", "end"}


def test_memory_over_time() -> None:
    ran = run(Allocate(0, COMPUTE), kernel(1, writes=(0,)), Allocate(1, COMPUTE), Free(0), sizes=(600, 5 * MIB))
    assert [sample[1:] for sample in ran.memory] == [
        (1024, 1024, 2 * MIB, 2 * MIB - 1024, 600),
        (1024 + 5 * MIB, 1024 + 5 * MIB, 22 * MIB, 17 * MIB - 1024, 600 + 5 * MIB),
        (5 * MIB, 5 * MIB, 22 * MIB, 15 * MIB, 5 * MIB),
    ]
    assert ran.peak("allocated") == 1024 + 5 * MIB
    assert ran.peak("reserved") == 22 * MIB


def test_a_program_that_does_not_fit() -> None:
    with pytest.raises(
        DeviceMemoryError, match=r"buffer 0 does not fit on paper.* 30\.0 MiB: of 20\.0 MiB.*; give it more"
    ):
        run(Allocate(0, COMPUTE), on=replace(AHEAD, capacity=20 * MIB), sizes=(30 * MIB,))


def freed_and_wanted_again(*recorded: Instruction) -> list[Instruction]:
    """The compute stream reads a buffer of the side stream for long; it is freed, and the side stream wants another."""
    return [
        Allocate(0, SIDE),
        issue(message(0), writes=(0,)),
        Wait(message(0), COMPUTE),
        kernel(100, reads=(0,)),
        *recorded,
        Free(0),
        Allocate(1, SIDE),
        issue(message(1), writes=(1,)),
    ]


WHOLE = (20 * MIB, 20 * MIB)  # a segment each


def test_memory_freed_without_record_stream_is_reused_too_early() -> None:
    ran = run(*freed_and_wanted_again(), sizes=WHOLE)
    (hazard,) = ran.hazards
    assert (hazard.kind, hazard.unit) == ("reused too early", "unit 1")
    assert hazard.text == (
        "buffer 1: all_gather on the link uses memory that was buffer 0, "
        "which kernel on the compute stream may still be using"
    )
    assert ran.peak("reserved") == 20 * MIB


def test_with_record_stream_it_is_held_back_and_memory_piles_up() -> None:
    ran = run(*freed_and_wanted_again(RecordStream(0, COMPUTE)), sizes=WHOLE)
    assert ran.hazards == []
    assert ran.peak("reserved") == ran.peak("active") == 40 * MIB
    assert ran.peak("allocated") == 20 * MIB


def test_a_host_that_has_waited_gets_the_memory_back() -> None:
    program = freed_and_wanted_again(RecordStream(0, COMPUTE))
    program[-2:-2] = [Record(0, COMPUTE), Synchronize(0)]
    ran = run(*program, sizes=WHOLE)
    assert ran.hazards == []
    assert ran.peak("reserved") == 20 * MIB
    assert times(ran, "communication") == [(0, 2), (102, 104)]


@pytest.mark.parametrize("records", [False, True])
def test_a_late_host_is_lucky_and_no_excuse(records: bool) -> None:
    late = replace(AHEAD, issue=1000.0)
    program = freed_and_wanted_again(*[RecordStream(0, COMPUTE)] * records)
    ran = run(*program[:-2], issue(message(1)), *program[-2:-1], issue(message(2), writes=(1,)), on=late, sizes=WHOLE)
    assert ran.peak("reserved") == 20 * MIB, "the kernel was over when the memory was asked for"
    assert bool(ran.hazards) != records


def test_a_retry_that_waits_for_the_device_is_no_hazard() -> None:
    ran = run(*freed_and_wanted_again(), on=replace(AHEAD, capacity=30 * MIB), sizes=(20 * MIB, 24 * MIB))
    assert ran.retries == 1
    assert ran.hazards == []


class Hasty(CachingAllocator):
    """Does not hold back what another stream uses."""

    def record_stream(self, block: Block, stream: int) -> None: ...


class Careless(CachingAllocator):
    """Records events and does not ask for them."""

    def collect(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                self._happened(waiting.popleft()[1])


@pytest.mark.parametrize("wrong", [Hasty, Careless])
def test_an_allocator_that_does_not_wait_is_found_out(wrong: type[CachingAllocator]) -> None:
    ran = run(*freed_and_wanted_again(RecordStream(0, COMPUTE)), sizes=WHOLE, make_allocator=wrong)
    assert [hazard.kind for hazard in ran.hazards] == ["reused too early"]


# Hazards


def kinds(*instructions: Instruction) -> list[tuple[str, str]]:
    """Kind and unit of each hazard."""
    return [(hazard.kind, hazard.unit) for hazard in run(*instructions).hazards]


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_reading_what_was_not_waited_for(seconds: float) -> None:
    """However long something else keeps the reader busy."""
    head = [Allocate(0, SIDE), issue(message(0), writes=(0,)), kernel(seconds)]
    assert kinds(*head, kernel(1, reads=(0,))) == [("missing wait", "unit 0")]
    assert kinds(*head, Wait(message(0), COMPUTE), kernel(1, reads=(0,))) == []
    assert kinds(*head, Wait(message(0), OTHER), kernel(1, reads=(0,))) == [("missing wait", "unit 0")]
    text = run(*head, kernel(1, reads=(0,))).hazards[0].text
    assert text == (
        "buffer 0: kernel on the compute stream uses what all_gather on the link writes, with no wait between them"
    )


def test_overwriting_what_is_still_being_read() -> None:
    head = [Allocate(0, COMPUTE), kernel(1, writes=(0,)), Record(0, COMPUTE), WaitEvent(0, SIDE)]
    head.append(issue(message(0), reads=(0,)))
    assert kinds(*head, kernel(1, reads=(0,))) == [], "two may read"
    assert kinds(*head, kernel(1, writes=(0,))) == [("missing wait", "unit 0")]
    assert kinds(*head, Wait(message(0), COMPUTE), kernel(1, writes=(0,))) == []


def test_order_is_passed_on() -> None:
    """The host has waited for the side stream, which has waited for the gather: so all that follows is ordered."""
    head = [Allocate(0, SIDE), issue(message(0), writes=(0,)), Wait(message(0), SIDE)]
    assert kinds(*head, Record(0, SIDE), Synchronize(0), kernel(1, OTHER, reads=(0,))) == []
    assert kinds(*head, Record(0, SIDE), WaitEvent(0, OTHER), kernel(1, OTHER, reads=(0,))) == []
    assert kinds(*head, Record(0, OTHER), Synchronize(0), kernel(1, OTHER, reads=(0,))) != []


def test_messages_are_in_order_among_themselves() -> None:
    head = [Allocate(0, COMPUTE), issue(message(0), SIDE, writes=(0,)), issue(message(1), OTHER, reads=(0,))]
    assert kinds(*head) == []
    assert kinds(*head, Wait(message(1), COMPUTE), kernel(1, writes=(0,))) == []


def test_memory_of_one_stream_that_is_first_used_on_another() -> None:
    """It may have been freed a moment ago, with kernels of its own stream still queued."""
    head = [Allocate(0, COMPUTE), kernel(9, writes=(0,)), Free(0), Allocate(1, COMPUTE)]
    assert kinds(*head, issue(message(0), writes=(1,))) == [("reused too early", "unit 1")]
    assert kinds(*head, Record(0, COMPUTE), WaitEvent(0, SIDE), issue(message(0), writes=(1,))) == []
    assert kinds(*head, kernel(1, writes=(1,))) == []


def test_a_use_is_remembered_through_pieces_and_through_buffers_that_nobody_uses() -> None:
    pieces = [Allocate(number, SIDE) for number in (1, 2)]
    head = [Allocate(0, SIDE), kernel(9, reads=(0,)), Free(0)]
    sizes = (20 * MIB, 4 * MIB, 4 * MIB, 20 * MIB)
    used = [kernel(1, SIDE, writes=(2,))]
    assert [hazard.unit for hazard in run(*head, *pieces, *used, sizes=sizes).hazards] == ["unit 2"]
    unused = [Allocate(3, SIDE), Free(3), Allocate(1, SIDE), kernel(1, SIDE, writes=(1,))]
    assert [hazard.unit for hazard in run(*head, *unused, sizes=sizes).hazards] == ["unit 1"]
    merged = [*pieces, *used, Free(1), Free(2), Allocate(3, SIDE), kernel(1, SIDE, reads=(3,))]
    assert [hazard.unit for hazard in run(*head, *merged, sizes=sizes).hazards] == ["unit 2", "unit 3"]


def test_an_event_between_two_uses_covers_the_first_only() -> None:
    head = [Allocate(0, SIDE), kernel(1, writes=(0,)), Record(0, COMPUTE), kernel(1, reads=(0,))]
    again = [Free(0), Allocate(1, SIDE), WaitEvent(0, SIDE), kernel(1, SIDE, writes=(1,))]
    assert kinds(*head, *again) == [("reused too early", "unit 1")]
    assert kinds(*head, Record(0, COMPUTE), *again) == []


def test_an_allocator_may_cut_where_it_likes() -> None:
    """What lies before and behind a block is still what it was."""
    hazards = Hazards()
    hazards.allocated(0, "old", "unit", Block(0, 30, SIDE, False))
    hazards.used("kernel", COMPUTE, {COMPUTE: 1}, (), (0,))
    hazards.freed(0, Block(0, 30, SIDE, False), [])
    for number, start in enumerate((10, 0, 20), start=1):
        hazards.allocated(number, f"new {start}", "unit", Block(start, 10, SIDE, False))
        hazards.used("kernel", SIDE, {SIDE: number}, (), (number,))
    assert [hazard.text.split(":")[0] for hazard in hazards.found] == ["new 10", "new 0", "new 20"]


def test_a_host_that_is_the_compute_has_no_hazards_but_of_the_link() -> None:
    program = freed_and_wanted_again()
    assert run(*program, on=ON_CPU, sizes=WHOLE).hazards == []
    unwaited = [each for each in program if not isinstance(each, Wait)]
    assert {hazard.kind for hazard in run(*unwaited, on=ON_CPU, sizes=WHOLE).hazards} == {"missing wait"}


# What a run says of itself


def test_steps_and_the_spans_of_the_last() -> None:
    ran = run(kernel(1), Mark("step"), kernel(4), kernel(2, SIDE), Mark("step"), kernel(1), kernel(9, SIDE))
    assert ran.steps == [4, 6]
    assert ran.seconds == 6
    assert [(span.start, span.end) for span in ran.last_step()] == [(0, 1), (0, 6)]


def test_kernels_take_the_longer_of_computing_and_moving_bytes() -> None:
    chip = replace(A100, flops={2: 100.0, 4: 50.0}, memory_bandwidth=10.0, efficiency=0.5)
    big = kernel(0)._replace(flops=1000.0, nbytes=20)
    assert chip.kernel(big) == 40
    assert chip.kernel(big._replace(dtype_size=2)) == 20
    assert chip.kernel(big._replace(nbytes=500)) == 100


@pytest.mark.parametrize("wrong", [{"bandwidth": 0}, {"capacity": -1}, {"flops": {2: 0.0}}, {"launch": -1e-6}])
def test_hardware_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"A100 80 GB: {next(iter(wrong))}.* (above|below) 0"):
        replace(A100, **wrong)


def test_a_second_free_is_refused() -> None:
    allocator = CachingAllocator(20 * MIB, Queues(AHEAD))
    block = allocator.malloc(MIB, COMPUTE)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)
    assert allocator.allocated == 0


def test_an_unknown_count_of_bytes() -> None:
    assert run().peak("reserved") == 0
    with pytest.raises(ValueError, match="no such count of bytes: used; choose from allocated"):
        run().peak("used")


def test_a_program_without_steps_says_so() -> None:
    with pytest.raises(ValueError, match=r'no mark "step": .*record_steps'):
        _ = run(kernel(1)).seconds
