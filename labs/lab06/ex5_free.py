"""Exercise 6.5: Free without stopping."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.late import link_of
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine import Recorder, measured, replay
from minifsdp.instruments.machine.program import (
    DEVICE,
    Allocate,
    Free,
    Kernel,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)

from .shared import CPU, POLLS, THE_CALLERS, WHOLE, LastMoment, Paper, asked_meanwhile, current_stream_kept, number_of


@reference(
    "6.5",
    hints=(
        "The allocator knows the stream on which the memory was allocated. Of every other one it has to hear before "
        "the memory is given back, and `device.record_stream` tells it of the *current* stream.",
        "For each reader: `with device.on_stream(reader): device.record_stream(buffer)`. After that, "
        "`buffer.untyped_storage().resize_(0)`.",
    ),
    forbids=(device.free,),
)
def free(buffer: Tensor, readers: list[Any]) -> None:
    """Free the memory of `buffer` immediately; its contents stay intact until the `readers` have reached this point.

    Args:
        buffer: a gathered unit. Views and autograd share its storage, so the storage shrinks to 0 bytes, while the
            tensor and its shape remain.
        readers: the streams on which queued kernels may still read the buffer, possibly none. Any stream may be the
            current one.

    Neither the host nor any stream waits. Every reader is recorded with the allocator, and no other stream. Nothing is
    computed or copied.

    Use `device.record_stream(buffer)`, `with device.on_stream(stream):` and `untyped_storage().resize_(nbytes)`.
    """
    for reader in readers:
        with device.on_stream(reader):
            device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


def asked_since(recorder, start):
    return recorder.program().instructions[start:]


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
