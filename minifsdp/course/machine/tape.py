"""The books of a recorder: they keep the order of everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from minifsdp import device
from minifsdp.comm import Call
from minifsdp.course.machine.program import (
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
from minifsdp.course.storages import Books, Entry, storages_in

_aten = torch.ops.aten
_FLOPS: Mapping[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::resize_", "aten::set_")


class Tape(Books):
    """Books that remember the order of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self._numbers: dict[Entry, int] = {}
        self._streams: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._kept: list[Any] = []  # events and streams, so that no two have one address
        self._made: dict[int, tuple[int, str, int]] = {}  # by buffer: its stream, the unit at work, its bytes
        self._tags: dict[int, Any] = {}
        self._names: dict[int, tuple[str, str]] = {}  # by address of a storage
        self._named: dict[int, str] = {}  # by buffer
        self._unit = "root"
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
            self._made[buffer] = (self._stream(), self._unit, nbytes)
            self._tags[buffer] = entry.tag
            self.instructions.append(Allocate(buffer, self._stream()))

    def _retag(self, entry: Entry, tag: Any) -> None:
        super()._retag(entry, tag)
        if entry in self._numbers:
            self._tags[self._numbers[entry]] = tag

    def reset(self) -> None:
        super().reset()
        alive = sorted(self._numbers.values())
        self.instructions = [Allocate(buffer, self._made[buffer][0]) for buffer in alive]

    def mark(self, name: str) -> Any:
        self.instructions.append(Mark(name))
        return super().mark(name)

    def name(self, tensor: Tensor, unit: str, what: str) -> None:
        for storage in storages_in(tensor):
            self._names[storage._cdata] = (unit, what)

    def _buffers(self, tensors: Any) -> tuple[int, ...]:
        """The numbers of what a kernel or collective touches; whose parameters they are is noted."""
        found: dict[int, None] = {}
        for storage in storages_in(tensors):
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry in self._numbers:
                found[self._numbers[entry]] = None
                if storage._cdata in self._names:
                    self._unit, what = self._names[storage._cdata]
                    self._named[self._numbers[entry]] = f"{self._unit} {what}"
        return tuple(found)

    # Work

    def kernel(self, func: Any, given: tuple[Any, Any], returned: Any, seconds: float) -> None:
        """An operator has run, and its outputs are in the books."""
        name = func.name()
        if self.are_paused:
            return
        with torch._C.DisableTorchFunctionSubclass():
            reads, writes = self._buffers(given), self._buffers(returned)
            if name.startswith("aten::_local_scalar_dense"):
                if any(self._made[buffer][2] > 8 or self._tags[buffer] != "optimizer" for buffer in reads):
                    self.instructions.append(Synchronize(None))  # Adam's counts of steps live on the host
                return
            if name.startswith(_NO_KERNEL) or not (func._schema.is_mutable or set(writes) - set(reads)):
                return  # a view, or memory without content
            tensors = [t for t in tree_leaves((given, returned)) if isinstance(t, Tensor)]
            size = next((t.element_size() for t in reversed(tensors) if t.is_floating_point()), 4)
            flops = (
                _FLOPS[func._overloadpacket](*given[0], **given[1], out_val=returned)
                if func._overloadpacket in _FLOPS
                else 0
            )
            self.instructions.append(
                Kernel(
                    name.removeprefix("aten::"),
                    self._unit,
                    self._stream(),
                    reads,
                    writes,
                    flops,
                    sum(t.numel() * t.element_size() for t in tensors),
                    size,
                    seconds,
                )
            )

    def issue(self, call: Call, tensors: list[Tensor]) -> None:
        """A collective begins: torch's functions take what they write first, and what they read last."""
        writes = () if call.op == "send" else self._buffers(tensors[:1])
        reads = () if call.op == "recv" else self._buffers(tensors[-1:])
        self.instructions.append(Issue(call, self._unit, self._stream(), reads, writes))

    @contextmanager
    def waits(self, call: Call, phase: Literal["issue", "wait"]) -> Iterator[None]:
        """A watcher of `comm`."""
        yield
        if phase == "wait":
            self.instructions.append(Wait(call, self._stream()))

    def command(self, command: device.Command) -> None:
        """A watcher of `device`."""
        stream = -1 if command.stream is None else self._number_of(command.stream, self._streams)
        match command.verb:
            case "record_stream":
                self.instructions += [RecordStream(buffer, stream) for buffer in self._buffers(command.subject)]
            case "record":
                self.instructions.append(Record(self._number_of(command.subject, self._events), stream))
            case "wait":
                self.instructions.append(WaitEvent(self._number_of(command.subject, self._events), stream))
            case "synchronize":
                self.instructions.append(Synchronize(self._number_of(command.subject, self._events)))

    def _stream(self) -> int:
        return self._number_of(device.current_stream(torch.device("cpu")), self._streams)

    def _number_of(self, thing: Any, numbers: dict[int, int]) -> int:
        if id(thing) not in numbers:
            numbers[id(thing)] = len(numbers)
            self._kept.append(thing)
        return numbers[id(thing)]

    def program(self) -> Program:
        buffers = {
            number: Buffer(self._named.get(number, f"{tag} of {unit}"), nbytes, tag)
            for number, ((_, unit, nbytes), tag) in enumerate(
                zip(self._made.values(), self._tags.values(), strict=True)
            )
        }
        return Program(list(self.instructions), buffers)
