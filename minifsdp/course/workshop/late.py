"""Collectives that run no earlier than at a wait, so that an answer without the wait fails each time.

On one machine gloo has often finished a small collective before the answer's next line reads the result. On this link,
a collective runs only when someone waits for it or for a later one. Until then its output holds NaN, and its input must
not change: other ranks get NaN for what was changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from minifsdp import comm
from minifsdp.instruments.launch import rank_device

WRITTEN = ("all_gather", "reduce_scatter", "all_to_all", "recv")  # their first argument: an output and no input
SENT = ("send", "recv")
NEVER = (
    "`comm.{}` only starts: until `.wait()` of the handle that it returns, its result is not there, or only this "
    "rank's own part of it"
)
CHANGED = "from `comm.{}` to `.wait()`, the tensor belongs to the collective: it was changed or freed in between"


class Late:
    """A link that starts collectives at a wait, in the order in which they were issued.

    Attributes:
        queued: issued and not started.
        pending: issued and not waited for.
        changed: the operations whose input was changed before they started.
    """

    def __init__(self) -> None:
        self.queued: list[_Message] = []
        self.pending: list[_Message] = []
        self.changed: list[str] = []

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> _Message:
        message = _Message(self, call, collective)
        self.queued.append(message)
        self.pending.append(message)
        return message

    def start(self, last: _Message) -> None:
        """Start all but the later collectives of the same group, for which no rank can be waiting yet."""
        if last not in self.queued:
            return
        later = self.queued[self.queued.index(last) + 1 :]
        stay = [each for each in later if each.call.group == last.call.group and each.call.op not in SENT]
        for message in [each for each in self.queued if each not in stay]:
            message.start()
        self.queued = stay

    def finish(self) -> str | None:
        """Run what is left, in which other ranks may take part; returns the slip that was made, if any.

        A send without a wait is not one of them.
        """
        never = [message.call.op for message in self.pending if message.call.op != "send"]
        for message in list(self.pending):
            message.wait()
        return NEVER.format(never[0]) if never else CHANGED.format(self.changed[0]) if self.changed else None


class _Message:
    """A collective, the content of its inputs when it was issued, and its work once it has started."""

    def __init__(self, link: Late, call: comm.Call, collective: Callable[[], Any]) -> None:
        self.link, self.call, self.collective = link, call, collective
        self.work: Any = None
        tensors = [each.detach() for each in getattr(collective, "args", ()) if isinstance(each, Tensor)]
        self.inputs = [(each, _content(each)) for each in tensors[call.op in WRITTEN :] if _has_memory(each)]
        if call.op in WRITTEN and tensors and _has_memory(tensors[0]):
            _fill(tensors[0])
            for tensor, content in self.inputs:  # in place, the input is a part of the output or has it as a part
                ctypes.memmove(tensor.data_ptr(), content, len(content))

    def start(self) -> None:
        for tensor, content in self.inputs:
            if not _has_memory(tensor):
                tensor.untyped_storage().resize_(_end(tensor))
            if _content(tensor) != content:
                self.link.changed.append(self.call.op)
                _fill(tensor)
        self.inputs = []
        self.work, self.collective = self.collective(), lambda: self.work

    def wait(self) -> None:
        if self in self.link.pending:
            self.link.pending.remove(self)
        self.link.start(self)
        self.work.wait()


class Seen(NamedTuple):
    """The return value of a check's function on one rank, and slips known to have been made there.

    Attributes:
        returned: the value.
        asked: of an answer that has asked for the world (subgroup.py).
        race: of an answer that has read or changed a tensor too early.
    """

    returned: Any
    asked: str | None = None
    race: str | None = None


def observed(observe: Callable[..., Any], args: tuple[Any, ...]) -> Seen:
    """Call `observe(*args)` with late collectives."""
    if rank_device().type != "cpu":  # on a GPU, the stream decides when a collective runs
        return Seen(observe(*args))
    with link_of(Late()) as late:
        try:
            returned = observe(*args)
        except RuntimeError as error:
            if late.pending and "modified inplace" in str(error):  # autograd has noticed the late collective
                error.add_note(f"likely slip: {NEVER.format(late.pending[0].call.op)}")
            raise
    return Seen(returned, race=late.finish())


@contextmanager
def link_of(link: Any) -> Iterator[Any]:
    """Inside, `link` carries the collectives instead of one that is around it; None: they start when issued."""
    before, comm.link = comm.link, link
    try:
        yield link
    finally:
        comm.link = before


# Modes, ledgers and version counters see nothing of these.


def _has_memory(tensor: Tensor) -> bool:
    """True if all its elements are in memory, in the order of its shape."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() >= _end(tensor)


def _end(tensor: Tensor) -> int:
    """Bytes of its storage up to its last element."""
    return (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()


def _content(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _fill(tensor: Tensor) -> None:
    """With bytes 0xFF: NaN in every floating-point dtype."""
    ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
