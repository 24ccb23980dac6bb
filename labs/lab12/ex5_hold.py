"""Exercise 12.5: Hold a buffer without record_stream."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, describe
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.held import Held, Recorded

from .shared import expect


@reference(
    "12.5",
    hints=(
        "There are two streams: the reader's is current in `keep`, the owner's in `give_back`. What must be in the "
        "owner's queue before the memory may be written to again?",
        "`keep` records an event on the current stream, and stores it with the buffer. For each of them, `give_back` "
        "calls `wait_event` of the current stream, then `buffer.untyped_storage().resize_(0)`; then it forgets all of "
        "them. Nothing makes the host wait.",
    ),
    forbids=(Held.keep, Held.give_back, Held.clear, Recorded.keep),
)
def hold() -> tuple[Callable[[Tensor], None], Callable[[torch.device], None]]:
    """Return two functions that share the kept buffers; another call returns an independent pair.

    `keep(buffer)`: the last reader of `buffer` has just been queued on the current stream; the buffer was allocated on
    another stream. Its memory stays.

    `give_back(on)`: the current stream of device `on` owns the kept buffers, and is about to allocate. Make this stream
    wait until each buffer kept so far has been read, and free the buffer's memory with
    `buffer.untyped_storage().resize_(0)`, because views keep the storage. Then forget the buffers. Different streams
    may have read them, or the same one; of each stream, waiting for its latest event is enough.

    Use `device.current_stream(where)`, and a stream's `record_event()` and `wait_event(event)`. The host must not wait.
    `device.free` calls `record_stream`, so it is of no use here.
    """
    kept: list[tuple[Tensor, Any]] = []

    def keep(buffer: Tensor) -> None:
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on: torch.device) -> None:
        for buffer, read in kept:
            device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


HOST = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself


class Told:
    """What a device with queues would have been told, in words, and which buffers were freed by then.

    The n-th buffer is the one kept when the n-th event was recorded.
    """

    def __init__(self, streams, buffers):
        self.streams, self.buffers = streams, [buffer.detach() for buffer in buffers]
        self.log, self.events, self.recorded_on, self.kept = [], {}, [], []
        self.asked = False

    def query(self):
        self.asked = True
        return False

    def __call__(self, command):
        stream = next((name for name, each in self.streams.items() if each is command.stream), "another stream")
        self.kept.append(command.subject)  # so that no other object gets its id
        if command.verb == "record":
            self.recorded_on.append(stream)
            self.events[id(command.subject)] = len(self.recorded_on)
            self.log.append(f"{stream} records event {len(self.recorded_on)}")
        elif command.verb == "wait":
            number = self.events.get(id(command.subject))
            event = f"event {number}" if number else "another event"
            freed = number and number <= len(self.buffers) and not self.buffers[number - 1].untyped_storage().nbytes()
            self.log.append(f"{stream} waits for {event}" + (", with its buffer freed" if freed else ""))
        else:
            self.log.append("the host waits" if command.verb == "synchronize" else f"{command.verb} on {stream}")

    def since(self):
        """The log since the last call."""
        said, self.log = self.log, []
        if self.asked and not said:
            said = ["the host asks whether an event has passed"]
        self.asked = False
        return said


@contextmanager
def told(streams, buffers):
    watch = Told(streams, buffers)
    device.command_observers.append(watch)
    try:
        with mock.patch.object(device.CpuEvent, "query", watch.query):
            yield watch
    finally:
        device.command_observers.remove(watch)


def pair_of(answer):
    pair = answer()
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError(f"expected two functions, `keep` and `give_back`, got {describe(pair)}")
    return pair


@check("12.5")
def check_hold(answer, variant):
    """Memory stays until the stream of its owner waits for the last reader, and the host never waits."""
    reader, owner = device.new_stream(HOST), device.new_stream(HOST)
    first, second, third = [torch.zeros(variant.size, device="cpu") for _ in range(3)]
    views = [buffer[:2] for buffer in (first, second, third)]  # a reference that is dropped frees nothing
    streams = {"the reader": reader, "the owner": owner}
    keep, give_back = pair_of(answer)
    other_keep, other_back = pair_of(answer)
    with told(streams, [first, second, third]) as watch:
        with device.on_stream(owner):
            give_back(HOST)
        expect(
            "commands of a `give_back` before any `keep`",
            watch.since(),
            [],
            slip="nothing is kept, nothing to wait for",
        )
        with device.on_stream(reader):
            keep(first)
            kept(watch.since(), first)
            keep(second)
            expect(
                "commands of a second `keep`", watch.since(), ["the reader records event 2"], slip="an event for each"
            )
            other_keep(third)
            watch.since()
        with device.on_stream(owner):
            give_back(HOST)
        given_back(watch.since(), "two buffers", {"first": views[0], "second": views[1]}, [2], [1, 2])
        if not device.is_allocated(third):
            raise AnswerError(
                "a second pair's buffer after the first pair's `give_back`: expected it allocated, got it freed\n"
                "likely slip: a list outside of the function is shared by all pairs: make it inside"
            )
        device.allocate(first)
        with device.on_stream(owner):
            give_back(HOST)
        slip = "what was given back has to be forgotten, or its memory is freed once more, while others use it"
        again = watch.since(), device.is_allocated(first)
        expect(
            "a third `give_back`: commands, and whether memory allocated since is there", again, ([], True), slip=slip
        )
        with device.on_stream(owner):
            other_back(HOST)
        given_back(watch.since(), "a single buffer", {"only": views[2]}, [3], [3])
    several_readers(keep, give_back, variant)
    dropped(keep, give_back, variant)


def several_readers(keep, give_back, variant):
    """Buffers of two readers, then one that both read: the latest event of each has to be waited for."""
    readers, owner = [device.new_stream(HOST) for _ in range(2)], device.new_stream(HOST)
    streams = {"the reader": readers[0], "the other reader": readers[1], "the owner": owner}
    four, shared = [torch.zeros(variant.size, device="cpu") for _ in range(4)], torch.zeros(variant.size, device="cpu")
    for which, buffers in (
        ("four buffers, read by two streams in turn", four),
        ("a buffer that two streams read", [shared] * 2),
    ):
        views, events = {f"number {n}": each[:2] for n, each in enumerate(buffers, start=1)}, range(1, len(buffers) + 1)
        with told(streams, buffers) as watch:
            for number, buffer in enumerate(buffers):
                with device.on_stream(readers[number % 2]):
                    keep(buffer)
            watch.since()
            with device.on_stream(owner):
                give_back(HOST)
            log = watch.since()
        if buffers is not four:  # freed before the second wait, or after it
            log = [each.removesuffix(", with its buffer freed") for each in log]
        given_back(log, which, views, list(events)[-2:], list(events))
        device.allocate(buffers[0])
        if views["number 1"].data_ptr() != buffers[0].data_ptr():
            raise AnswerError(FREED_UNDER_VIEWS)


FREED_UNDER_VIEWS = (
    "buffers after `give_back`: expected no memory, got a tensor with other memory\n"
    "likely slip: views keep a storage alive; `buffer.untyped_storage().resize_(0)` frees it under them"
)


def dropped(keep, give_back, variant):
    """A buffer to which nobody else has a reference."""
    buffer = torch.zeros(variant.size, device="cpu")
    storage = buffer.untyped_storage()  # not a view, which would refer to the buffer
    with device.on_stream(device.new_stream(HOST)):
        keep(buffer)
    del buffer
    give_back(HOST)
    slip = "only a weak reference was kept: the caller may drop the buffer, whose memory nobody could give back then"
    expect("bytes of a buffer that the caller has dropped", storage.nbytes(), 0, slip=slip)


def kept(log, buffer):
    if not device.is_allocated(buffer):
        raise AnswerError(
            "the buffer after `keep`: expected it allocated, got it freed\n"
            "likely slip: its reader is only queued, and the owner's stream could be handed this memory at once"
        )
    recorded = "the reader records event 1"
    slips = {
        "`record_stream` is what this replaces: the allocator would hold the memory back until it polls": [
            "record_stream on the reader"
        ],
        "an event marks the end of this reader; the stream's end, later, is behind other work as well": [],
        "it is the owner that waits, and later: the reader goes on": [recorded, "the reader waits for event 1"],
        "the host must not wait: it runs ahead": [recorded, "the host waits"],
    }
    slip = "one event, behind the last reader, on the stream that is current now"
    expect("commands of a `keep`", log, [recorded], slips=slips, slip=slip)


def given_back(log, which, views, latest, events):
    """Of buffers whose memory has to be there until the owner waits: for all `events`, or the `latest` of each reader.

    Args:
        log: commands of a `give_back`.
        which: the buffers in words.
        views: a view of each.
        latest: the last event of each reader.
        events: one for each buffer.
    """
    what = f"commands of a `give_back` of {which}"
    needed = "a wait" if len(latest) == 1 else f"{len(latest)} waits"
    for words, slip in (
        ("the host asks", "the queue waits, whether an event has passed or not: every kept buffer is given back"),
        ("the host waits", "`synchronize` stops the host; `wait_event` puts the wait into the stream's queue"),
        ("record_stream", "`device.free` calls `record_stream`; after the wait, `resize_(0)` of the storage is enough"),
        ("records", "an event of now is on the wrong stream: the reader's event was recorded in `keep`"),
        ("freed", "first the wait, then the free: freed memory may be reused at once"),
        ("reader waits", "the stream that is current in `give_back` is the owner's: let that one wait"),
        ("another stream", "`device.current_stream(on)` is the owner's stream"),
    ):
        if any(words in each for each in log):
            raise AnswerError(f"{what}: expected {needed} of the owner, got {describe(log)}\nlikely slip: {slip}")
    wait = "the owner waits for event {}".format
    if any(each.startswith("the owner waits") and each not in map(wait, events) for each in log):
        slip = "this event is another pair's: a list outside of the function is shared by all pairs: make it inside"
        raise AnswerError(f"{what}: expected {needed} of the owner, got {describe(log)}\nlikely slip: {slip}")
    if not log and all(view.untyped_storage().nbytes() for view in views.values()):
        slip = "all that is kept is given back, however little it is"
        raise AnswerError(f"{what}: expected a wait and a free, got neither\nlikely slip: {slip}")
    strange = [each for each in log if each not in map(wait, events)]
    if strange or len(set(log)) < len(log) or any(wait(number) not in log for number in latest):
        slips = {
            "freed without a wait: the reader may not even have begun": [],
            "the last event alone: another stream may have recorded the first": [wait(events[-1])],
            "the oldest alone: all that is kept is given back": [wait(events[0])],
        }
        slip = "each buffer's own event, once"
        if len(latest) > 1:
            del slips["the oldest alone: all that is kept is given back"]
            slip = "of each stream that has read a buffer, its latest event at least"
        expect(what, log, [wait(number) for number in events], slips=slips, slip=slip)
    left = [name for name, view in views.items() if view.untyped_storage().nbytes()]
    slip = "views keep a storage alive; `buffer.untyped_storage().resize_(0)` frees it under them"
    if left and len(left) < len(views):
        slip = "all that is kept is given back"
    expect(f"of {which}, those that have memory after `give_back`", left, [], slip=slip)
