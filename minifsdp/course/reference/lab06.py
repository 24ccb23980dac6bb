"""Reference answers of lab 06, overlap."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit


class Piece(Protocol):
    """A piece of work; the notebook defines the class."""

    @property
    def stream(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def after(self) -> tuple[int, ...]: ...
    @property
    def host_waits(self) -> bool: ...


class Did(Protocol):
    """A line of the log; the notebook defines the class."""

    @property
    def verb(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def stream(self) -> str: ...


class Reducing(Protocol):
    """The unit interface that `start_reduction` may use."""

    device: torch.device

    def start_reduce(self) -> None: ...
    def wait_reduce(self) -> None: ...


@reference(
    "6.1",
    hints=(
        "Keep three things: where the host is, when each stream is free, and when each piece was over. A piece starts "
        "at the latest of what it has to wait for; nothing else delays it.",
        "In the loop the host moves on by `launch`. Then `start = max(host, free.get(piece.stream, 0.0), "
        "*(ends[number] for number in piece.after))`. Where `piece.host_waits` the host is then where the piece ends.",
    ),
)
def finish_times(queued: list[Piece], launch: float) -> list[float]:
    """The end time of each piece of work, in seconds."""
    host, free, ends = 0.0, dict[str, float](), list[float]()
    for piece in queued:
        host += launch
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = ends[-1]
    return ends


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
    """Make work queued on `taker` from now on wait for the work already queued on `giver`."""
    taker.wait_event(giver.record_event())


@reference(
    "6.3",
    hints=(
        "Lab 05's gather without its last word, and inside a `with device.on_stream(...)`. Both calls belong in it: "
        "the allocator gives memory out by stream, and the collective begins when its stream has come to it.",
        "`with device.on_stream(stream):` then `device.allocate(flat.full)` and `return comm.all_gather(...)`, whose "
        "value is the handle. No wait of any kind.",
    ),
    forbids=(FlatUnit._gather,),
)
def gather(flat: FlatParameter, group: Group, stream: Any) -> Handle:
    """Start the unit's all-gather on `stream`; the caller waits for the returned handle."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full.data, flat.shard.data, group)


@reference(
    "6.4",
    hints=(
        "Keep for each stream the set of gathers that it can be sure of, for each unit the gather that was issued "
        "last, for each event what its stream was sure of when it was recorded. A gather is known by its line's "
        "number, so that the next one of the same unit is another.",
        '"wait" adds `last[unit]` to the set of its own stream. "record" copies the set of its stream: '
        '`events[name] = set(known)`. "wait event" adds that copy to the set of the waiting stream. A "read" is too '
        "early if the last gather of the unit is not in the set of its stream, or if there is none.",
    ),
)
def missing_waits(log: list[Did]) -> list[int]:
    """The numbers of the lines that read a unit whose last gather may still be under way."""
    sure: dict[str, set[int]] = {}  # by stream, the gathers that are over before whatever it does next
    events: dict[str, set[int]] = {}
    last: dict[str, int] = {}
    found = []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        match line.verb:
            case "gather":
                last[line.what] = number
            case "wait":
                known.add(last[line.what])
            case "record":
                events[line.what] = set(known)
            case "wait event":
                known |= events[line.what]
            case "read" if last.get(line.what) not in known:
                found.append(number)
    return found


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
    """Free the memory of `buffer` at once; its bytes stay intact until the `readers` have reached this point."""
    for reader in readers:
        with device.on_stream(reader):
            device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@reference(
    "6.6",
    hints=(
        "Three things in order: the reduction before this one is over for `stream`; `stream` waits for the gradient; "
        "the reduction is issued. Which of them may name the current stream, and which belongs under `on_stream`?",
        "`while under_way: with device.on_stream(stream): under_way.pop().wait_reduce()`. Then "
        "`stream.wait_stream(device.current_stream(unit.device))` (6.2 in one call), and under `on_stream` again "
        "`unit.start_reduce()`. Last, `under_way.append(unit)`.",
    ),
)
def start_reduction(unit: Reducing, stream: Any, under_way: list[Reducing]) -> None:
    """Issue the reduction of `unit`'s gradient on `stream`, one at a time, while the current stream computes on."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)
