"""The books under the ledger: the live storages, with their sizes and purposes.

A storage is entered when an operator first returns it, once with its size in bytes, regardless of the number of views,
and removed when it dies: the books hold only weak references.
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
from torch.nn import Parameter

from minifsdp.private import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    has_storage,
    identity,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

Tag = Literal["parameters", "unsharded", "gradients", "optimizer", "activations", "communication"]
TAGS: tuple[Tag, ...] = get_args(Tag)


@dataclass(frozen=True)
class Event:
    """A change of the live bytes, or a mark if there are no changes.

    Attributes:
        cause: the operator or method that caused it, or a mark's name.
        changes: change in bytes, by affected tag.
        at: microseconds since 1970, the clock of torch's memory snapshots; ignored in comparisons.
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
    event: Event | None = None  # the last event that changed its size


class _ThisThread(threading.local):
    pauses = 0


class Books:
    """Live bytes by tag, and every change of them since the last `reset`.

    Attributes:
        start: bytes by tag at the last reset.
        now: bytes by tag.
        events: the changes from `start` to `now`, in order.
        listeners: each is called after an operator or a resize has changed a storage, not when a storage dies:
            nothing may be touched then.
    """

    def __init__(self) -> None:
        self.start: dict[Tag, int] = dict.fromkeys(TAGS, 0)
        self.now = dict(self.start)
        self.events: list[Event] = []
        self.listeners: list[Callable[[], None]] = []
        self._entries: dict[int, Entry] = {}  # by the storage's address, unique while it lives
        self._lock = threading.RLock()  # a storage dies on the thread that held the last reference
        self._this_thread = _ThisThread()

    def tag(self, tensor: Tensor, tag: Tag) -> None:
        """Tag a tensor's storage: once, except that staging may become gradients (Ledger.tag)."""
        for storage in storages_in(tensor):
            with self._lock:
                self._see(storage, "tag", tag)
                entry = self._entries[identity(storage)]
                if entry.tag == "activations" != tag or (entry.tag, tag) == ("communication", "gradients"):
                    self._retag(entry, tag)

    def mark(self, name: str) -> dict[Tag, int]:
        """Add a mark; returns the live bytes by tag."""
        with self._lock:
            self._book(name, {})
            return dict(self.now)

    def reset(self) -> None:
        """Begin a new list of events."""
        with self._lock:
            self.start, self.events = dict(self.now), []

    def close(self) -> None:
        """Stop tracking storages; keep the events."""
        with self._lock:
            self._entries.clear()

    def resized(self, storage: UntypedStorage) -> None:
        """Record a call of a storage's `resize_`. An unknown storage's memory counts as new."""
        if identity(storage) in self._entries or storage.device.type != "meta":
            self._see(storage, "resize_")
            self._tell()

    def operator(self, name: str, given: Any, returned: Any) -> None:
        """Record an operator's outputs: storages that it returns but did not receive are new."""
        if self.are_paused:
            return
        with DisableTorchFunctionSubclass():
            changed = [storage for storage in storages_in(returned) if self._has_changed(storage, name, given)]
        for storage in changed:
            self._see(storage, name)
        if changed:
            self._tell()

    def _has_changed(self, storage: UntypedStorage, name: str, given: Any) -> bool:
        if entry := self._entries.get(identity(storage)):
            return entry.nbytes != storage.nbytes()
        # torch.tensor passes new storage through lift_fresh
        return name == "aten::lift_fresh" or identity(storage) not in map(identity, storages_in(given))

    def _tell(self) -> None:
        for listen in self.listeners:
            listen()

    @property
    def are_paused(self) -> bool:
        return self._this_thread.pauses > 0

    @contextmanager
    def paused(self, *_: Any) -> Iterator[None]:
        """Ignore this thread's new storages inside the `with`. Frees and resizes are still recorded."""
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
        if self.events and self.events[-1] is entry.event:  # merge the growth into this event
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
    """Report every operator on this thread, and on autograd's threads that act for it, to the books."""

    def __init__(self, books: Books) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._books = books

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor's operators come back here on its local tensor
        if func.namespace == "prim":  # a tensor without memory is asked for its device
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and enter its outputs."""
        returned = func(*args, **kwargs)
        self._books.operator(func.name(), (args, kwargs), returned)
        return returned


def tell_resizes(books: Books) -> Callable[[UntypedStorage, int], Any]:
    """A version of `UntypedStorage.resize_`, which is not an operator, that reports to the books."""
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        books.resized(storage)
        return result

    return resize_


_PLAIN = (Tensor, Parameter)  # no subclass: most tensors, for which torch's question would take longest


@contextmanager
def garbage_collected_by_us() -> Iterator[None]:
    """Allow only explicit garbage collections inside the `with`; they are cheap, since older objects are frozen."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def storages_in(given: Any) -> list[UntypedStorage]:
    """The storages in an operator's inputs or outputs."""
    found: list[UntypedStorage] = []
    for leaf in (given,) if type(given) in _PLAIN else leaves_in(given):
        if type(leaf) not in _PLAIN and not isinstance(leaf, Tensor):
            if isinstance(leaf, UntypedStorage):
                found.append(leaf)
        elif type(leaf) not in _PLAIN and is_traceable_wrapper_subclass(leaf):
            # a DTensor's storage is that of its local tensor
            found += storages_in([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif not leaf.is_meta and has_storage(leaf):  # sparse tensors have no storage
            found.append(leaf.untyped_storage())
    return found


def leaves_in(given: Any) -> list[Any]:
    """An operator's inputs or outputs out of their lists, tuples and dicts.

    torch's `tree_leaves`, which knows other containers too, would take most of the time of a recorded operator.
    """
    if not isinstance(given, (list, tuple, dict)):
        return [given]
    found: list[Any] = []
    for each in given.values() if isinstance(given, dict) else given:
        if isinstance(each, (list, tuple, dict)):
            found += leaves_in(each)
        else:
            found.append(each)
    return found
