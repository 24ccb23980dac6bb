"""A recorder's books, which also record the order of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.comm import Call
from minifsdp.instruments.machine.operators import flops_of, work_of
from minifsdp.instruments.machine.program import (
    DEVICE,
    Allocate,
    Buffer,
    Free,
    Instruction,
    Issue,
    Kernel,
    Mark,
    Program,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    WaitEvent,
)
from minifsdp.instruments.watch.storages import Books, Entry, storages_in
from minifsdp.private import DisableTorchFunctionSubclass, identity

_LIFT_FRESH = "aten::lift_fresh"  # torch.tensor passes its new storage through it; by its schema it is a view


class _Made(NamedTuple):
    """A buffer's allocation: its stream, the unit that was running, and its size in bytes."""

    stream: int
    unit: str
    nbytes: int


class Tape(Books):
    """Books that also record all events as instructions, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self._numbers: dict[Entry, int] = {}
        self._streams: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._kept: list[Any] = []  # keep events and streams alive, so that ids are not reused
        self._made: dict[int, _Made] = {}  # by buffer
        self._tags: dict[int, Any] = {}
        self._names: dict[int, tuple[str, str]] = {}  # unit and what, by address of a storage
        self._named: dict[int, tuple[str, str]] = {}  # the same, by buffer
        self._on_host: set[int] = set()  # buffers that stay on the host, such as Adam's step counts
        self._unit = "unnamed"  # until a unit named by `watch` is read
        self._number_of(device.current_stream(torch.device("cpu")), self._streams)

    # Memory

    def _resize(self, entry: Entry, nbytes: int, cause: str) -> None:
        before = entry.nbytes
        super()._resize(entry, nbytes, cause)
        if nbytes == before:
            return
        if before:
            self.instructions.append(Free(self._numbers.pop(entry)))
        if nbytes:
            buffer = self._numbers[entry] = len(self._made)
            self._made[buffer] = _Made(self._stream(), self._unit, nbytes)
            self._tags[buffer] = entry.tag
            self.instructions.append(Allocate(buffer, self._stream()))

    def _retag(self, entry: Entry, tag: Any) -> None:
        super()._retag(entry, tag)
        if entry in self._numbers:
            self._tags[self._numbers[entry]] = tag

    def reset(self) -> None:
        super().reset()
        alive = sorted(self._numbers.values())
        self.instructions = [Allocate(buffer, self._made[buffer].stream) for buffer in alive]

    def mark(self, name: str) -> Any:
        self.instructions.append(Mark(name))
        if name == "optimizer":
            self._unit = name  # until it reads the shard of a unit
        return super().mark(name)

    def name(self, tensor: Tensor, unit: str, what: str) -> None:
        for storage in storages_in(tensor):
            self._names[identity(storage)] = (unit, what)

    def _died(self, key: int) -> None:
        self._names.pop(key, None)
        super()._died(key)

    def _buffers(self, tensors: Any) -> tuple[int, ...]:
        """The numbers of the buffers behind tensors."""
        found: dict[int, None] = {}
        for storage in storages_in(tensors):
            entry = self._entries.get(identity(storage))
            if entry is not None and entry in self._numbers:
                found[self._numbers[entry]] = None
                if identity(storage) in self._names:
                    self._named[self._numbers[entry]] = self._names[identity(storage)]
        return tuple(found)

    def _unit_of(self, buffer: int) -> str:
        return self._named[buffer][0] if buffer in self._named else self._made[buffer].unit

    # Work

    def begins(self, func: Any, given: Any) -> None:
        """Note the running unit before an operator: the last named unit among its arguments; views are ignored."""
        if not (self.are_paused or func.is_view):
            with DisableTorchFunctionSubclass():
                named = [buffer for buffer in self._buffers(given) if buffer in self._named]
            self._unit = self._unit_of(named[-1]) if named else self._unit

    def kernel(self, func: Any, args: Any, kwargs: Any, returned: Any, seconds: float) -> None:
        """Record an operator that has run and whose outputs are in the books. Views do no work."""
        if self.are_paused or (func.is_view and func.name() != _LIFT_FRESH):
            return
        with DisableTorchFunctionSubclass():
            work = work_of(func, args, kwargs, returned)
            reads, writes = self._buffers(work.reads), self._buffers(work.writes)
            if self._is_the_hosts(func.name(), reads, writes, returned):
                return
            if func.name() == "aten::_local_scalar_dense":
                self.instructions.append(Synchronize(None))
            if work.runs:
                name, flops = func.name().removeprefix("aten::"), flops_of(func, args, kwargs, returned)
                what = (reads, writes, flops, work.nbytes, work.dtype_size, seconds)
                self.instructions.append(Kernel(name, self._unit, self._stream(), *what))

    def _is_the_hosts(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], returned: Any) -> bool:
        """True if an operator creates a host scalar or works only on host scalars."""
        if name == _LIFT_FRESH:
            self._on_host.update(buffer for buffer in self._buffers(returned) if self._made[buffer].nbytes <= 8)
            return True
        return bool(reads) and self._on_host.issuperset(reads + writes)

    def issue(self, call: Call, tensors: list[Tensor]) -> None:
        """Record a collective: torch's functions take their output first and their input last."""
        writes = () if call.op == "send" else self._buffers(tensors[:1])
        reads = () if call.op == "recv" else self._buffers(tensors[-1:])
        unit = next(map(self._unit_of, reads + writes), self._unit)
        for buffer in writes:
            self._made[buffer] = self._made[buffer]._replace(unit=unit)
        self.instructions.append(Issue(call, unit, self._stream(), reads, writes))

    @contextmanager
    def waits(self, call: Call, phase: Literal["issue", "wait"]) -> Iterator[None]:
        """An observer of `comm`."""
        yield
        if phase == "wait":
            self.instructions.append(Wait(call, self._stream()))

    def command(self, command: device.Command) -> None:
        """An observer of `device`."""
        stream = -1 if command.stream is None else self._number_of(command.stream, self._streams)
        match command.verb:
            case "record_stream":
                self.instructions += [RecordStream(buffer, stream) for buffer in self._buffers(command.subject)]
            case "record":
                self.instructions.append(Record(self._number_of(command.subject, self._events), stream))
            case "wait":
                self.instructions.append(WaitEvent(self._number_of(command.subject, self._events), stream))
            case "synchronize":
                whole = isinstance(command.subject, torch.device)
                event = DEVICE if whole else self._number_of(command.subject, self._events)
                self.instructions.append(Synchronize(event))

    def _stream(self) -> int:
        return self._number_of(device.current_stream(torch.device("cpu")), self._streams)

    def _number_of(self, thing: Any, numbers: dict[int, int]) -> int:
        if id(thing) not in numbers:
            numbers[id(thing)] = len(numbers)
            self._kept.append(thing)
        return numbers[id(thing)]

    def program(self) -> Program:
        buffers = {}
        for number, made in self._made.items():
            tag = self._tags[number]
            name = " ".join(self._named[number]) if number in self._named else f"{tag} of {made.unit}"
            buffers[number] = Buffer(name, made.nbytes, tag, self._unit_of(number))
        return Program(list(self.instructions), buffers)
