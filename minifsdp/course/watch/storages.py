"""The books under the ledger: which storages are alive, how large each is, and what it is for.

A storage is entered when an operator first returns it, at its size in bytes however many tensors view it, and struck
out at the moment it dies: the books hold weak references only.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, UntypedStorage

from minifsdp.private import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    has_storage,
    identity,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    tree_leaves,
)

Tag = Literal["parameters", "unsharded", "gradients", "optimizer", "activations", "communication"]
TAGS: tuple[Tag, ...] = get_args(Tag)


@dataclass(frozen=True)
class Event:
    """A change of the live bytes, or, without changes, a mark.

    Attributes:
        cause: the operator or method behind it; a mark's name.
        changes: bytes more or fewer, for each tag it touches.
        at: microseconds since 1970, the clock of torch's memory snapshots; equal events may differ in it.
    """

    cause: str
    changes: dict[Tag, int]
    at: int = field(compare=False)


@dataclass(slots=True, eq=False)
class Entry:
    """A storage in the books."""

    tag: Tag
    alive: weakref.ref[UntypedStorage]
    nbytes: int = 0
    event: Event | None = None  # the last that changed its size


class _ThisThread(threading.local):
    pauses = 0


class Books:
    """Live bytes by tag, and every change of them since the last `reset`.

    Attributes:
        start: bytes by tag at the last reset.
        now: bytes by tag.
        events: what led from the one to the other, in order.
    """

    def __init__(self) -> None:
        self.start: dict[Tag, int] = dict.fromkeys(TAGS, 0)
        self.now = dict(self.start)
        self.events: list[Event] = []
        self._entries: dict[int, Entry] = {}  # by the storage's address, which is its own as long as it lives
        self._lock = threading.RLock()  # a storage dies on whichever thread had the last reference
        self._this_thread = _ThisThread()

    def tag(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a tensor's storage is for: once, but that staging may become gradients (Ledger.tag)."""
        for storage in storages_in(tensor):
            with self._lock:
                self._see(storage, "tag", tag)
                entry = self._entries[identity(storage)]
                if entry.tag == "activations" != tag or (entry.tag, tag) == ("communication", "gradients"):
                    self._retag(entry, tag)

    def mark(self, name: str) -> dict[Tag, int]:
        """Enter a mark; returns the bytes at it."""
        with self._lock:
            self._book(name, {})
            return dict(self.now)

    def reset(self) -> None:
        """Begin a new list of events."""
        with self._lock:
            self.start, self.events = dict(self.now), []

    def close(self) -> None:
        """Stop following storages; what is written stays."""
        with self._lock:
            self._entries.clear()

    def resized(self, storage: UntypedStorage) -> None:
        """A storage's `resize_` was called. Memory that an unknown one has now is new, whenever it was made."""
        if identity(storage) in self._entries or storage.device.type != "meta":
            self._see(storage, "resize_")

    def operator(self, name: str, given: Any, returned: Any) -> None:
        """An operator has run: storages that it returns and was not given are new."""
        if self.are_paused:
            return
        with DisableTorchFunctionSubclass():
            # lift_fresh is how torch.tensor hands over what it has just made
            old = set() if name == "aten::lift_fresh" else {identity(storage) for storage in storages_in(given)}
            for storage in storages_in(returned):
                if identity(storage) in self._entries or identity(storage) not in old:
                    self._see(storage, name)

    @property
    def are_paused(self) -> bool:
        return self._this_thread.pauses > 0

    @contextmanager
    def paused(self, *_: Any) -> Iterator[None]:
        """Enter nothing new that this thread makes inside the `with`. Storages die and are resized as ever."""
        self._this_thread.pauses += 1
        try:
            yield
        finally:
            self._this_thread.pauses -= 1

    def _see(self, storage: UntypedStorage, cause: str, tag: Tag = "activations") -> None:
        key = identity(storage)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = Entry(tag, weakref.ref(storage, lambda _: self._died(key)))
            self._resize(self._entries[key], storage.nbytes(), cause)

    def _died(self, key: int) -> None:
        with self._lock:
            if entry := self._entries.pop(key, None):
                self._resize(entry, 0, "free")

    def _resize(self, entry: Entry, nbytes: int, cause: str) -> None:
        if nbytes != entry.nbytes:
            entry.event = self._book(cause, {entry.tag: nbytes - entry.nbytes})
            entry.nbytes = nbytes

    def _retag(self, entry: Entry, tag: Tag) -> None:
        before, entry.tag = entry.tag, tag
        if not entry.nbytes:
            return
        cause, grown = "tag", 0
        if self.events and self.events[-1] is entry.event:  # tagged at once: what it grew by never was anything else
            whole = self.events.pop()
            cause, grown = whole.cause, whole.changes[before]
            self.now[before] -= grown
        changes: dict[Tag, int] = {tag: entry.nbytes}
        if grown != entry.nbytes:
            changes[before] = grown - entry.nbytes
        self._book(cause, changes)

    def _book(self, cause: str, changes: dict[Tag, int]) -> Event:
        event = Event(cause, changes, time.time_ns() // 1000)
        self.events.append(event)
        for tag, change in changes.items():
            self.now[tag] += change
        return event


class Operators(TorchDispatchMode):
    """Shows the books every operator that runs on this thread, and on autograd's threads in its stead."""

    def __init__(self, books: Books) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._books = books

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor comes down to operators on its local tensor, which come here again
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and enter what it has returned."""
        returned = func(*args, **kwargs)
        self._books.operator(func.name(), (args, kwargs), returned)
        return returned


def tell_resizes(books: Books) -> Callable[[UntypedStorage, int], Any]:
    """`UntypedStorage.resize_`, which is no operator, in a version that tells the books."""
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        books.resized(storage)
        return result

    return resize_


@contextmanager
def garbage_collected_by_us() -> Iterator[None]:
    """Inside the `with` only explicit collections run, and they are cheap: they spare what was there before."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def storages_in(tree: Any) -> Iterator[UntypedStorage]:
    """The storages in what an operator takes or returns."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, UntypedStorage):
            yield leaf
        elif isinstance(leaf, Tensor):
            if is_traceable_wrapper_subclass(leaf):  # a DTensor's elements are those of its local tensor
                yield from storages_in([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
            elif leaf.device.type != "meta" and has_storage(leaf):  # sparse tensors have none of their own
                yield leaf.untyped_storage()
