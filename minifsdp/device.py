"""A single code path for CPU and CUDA: streams, events, memory, and the allocation of all buffers.

On CUDA the streams and events are torch's own. On CPU every operation has finished when it returns, so a stream is only
a name, waiting does nothing, and an event is a reading of the clock. But `command_observers` receive the commands that
a device with queues would have received.

Buffers that communication reads or writes are allocated only here, each with its role, so that bytes can be counted
(`buffer_observers`). A buffer is the same Tensor object throughout its life. `allocate` gives it memory and `free`
takes the memory away, which affects every view of it (as with `resize_` in torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifsdp import private

Role = Literal["unsharded", "gradients", "communication"]

buffer_observers: list[Callable[[Tensor, Role], None]] = []
"""Each is called with every buffer that `empty` hands out, and with its role."""


class Command(NamedTuple):
    """A command of the host to a device with queues; on CPU it does nothing.

    Attributes:
        verb: "record" an event on a stream; let a stream "wait" for an event; let the host "synchronize" with one;
            "record_stream": a buffer is in use on a stream; "copy_to_host": a copy is made in host memory.
        stream: the queue it goes into; None if the host itself waits.
        subject: the event, the buffer or the copy; the device, if the host waits for all work queued there.
    """

    verb: Literal["record", "wait", "synchronize", "record_stream", "copy_to_host"]
    stream: CpuStream | None
    subject: Any


command_observers: list[Callable[[Command], None]] = []
"""Each is called with every command on CPU, in the order of the program."""


class CpuEvent:
    """An event on a device without queues: it is complete as soon as it is recorded."""

    def __init__(self) -> None:
        self.at = 0.0  # seconds

    def record(self, stream: CpuStream | None = None) -> None:
        self.at = time.perf_counter()
        _tell("record", stream or _streams[-1], self)

    def wait(self, stream: CpuStream | None = None) -> None:
        _tell("wait", stream or _streams[-1], self)

    def synchronize(self) -> None:
        _tell("synchronize", None, self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to `end`, as `torch.cuda.Event.elapsed_time`."""
        return (end.at - self.at) * 1e3


class CpuStream:
    """A stream on a device without queues; as a context manager it is the current one."""

    def __enter__(self) -> CpuStream:
        _streams.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _streams.pop()

    def wait_stream(self, other: CpuStream) -> None:
        if command_observers:
            event = CpuEvent()
            event.record(other)
            self.wait_event(event)

    def wait_event(self, event: CpuEvent) -> None:
        event.wait(self)

    def record_event(self) -> CpuEvent:
        event = CpuEvent()
        event.record(self)
        return event


_streams = [CpuStream()]  # the compute stream, and those entered since


def _tell(verb: Any, stream: CpuStream | None, subject: Any) -> None:
    for observe in command_observers:
        observe(Command(verb, stream, subject))


def asked_for(wanted: Any, argument: str) -> torch.device:
    """The device that an argument names: the index of a CUDA device, a string, or a device.

    Raises:
        ValueError: it does not name a device, or this machine does not have the device.
    """
    try:
        is_index = isinstance(wanted, int) and not isinstance(wanted, bool)
        device = torch.device("cuda", wanted) if is_index else torch.device(wanted)
    except (RuntimeError, TypeError):
        raise ValueError(f"{argument}={wanted!r}: give a device, or the index of a CUDA device") from None
    there = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and not there:
        raise ValueError(
            f"{argument}={wanted!r} is a CUDA device, and there is none here: leave {argument} out, or pass "
            "torch.device('cpu')"
        )
    if there and (device.index or 0) >= there:
        raise ValueError(f"{argument}={wanted!r}: CUDA devices are numbered from 0 to {there - 1} here")
    return device


def compute_device(wanted: torch.device | None, tensors: Iterable[Tensor], group: Any) -> torch.device:
    """The device a rank computes on: `wanted`, else its tensors' device, else one that its process group serves.

    Args:
        wanted: see `asked_for`.
        tensors: one that is neither on CPU nor on meta decides.
        group: decides the rest: CPU, if its backend serves that.
    """
    if wanted is not None:
        return wanted
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    if "cpu" in private.device_types_of(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def new_stream(device: torch.device, priority: int = 0) -> Any:
    """A queue of work next to the compute stream; with a negative `priority`, it runs first if kernels compete."""
    return torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else CpuStream()


def current_stream(device: torch.device) -> Any:
    """The stream that the caller's next kernel goes to."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else _streams[-1]


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Issue the work inside the `with` on `stream`."""
    context: AbstractContextManager[Any] = stream if isinstance(stream, CpuStream) else torch.cuda.stream(stream)
    return context


def new_event(device: torch.device) -> Any:
    """A timed event: `record`, `wait`, `synchronize`, `query`, `elapsed_time` (milliseconds)."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else CpuEvent()


def runs_behind(device: torch.device) -> bool:
    """True if the host only queues work there: on CUDA, and on CPU while someone follows its commands."""
    return device.type == "cuda" or bool(command_observers)


def synchronize(device: torch.device) -> None:
    """Let the host wait until the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        _tell("synchronize", None, device)


def empty(numel: int, dtype: torch.dtype, role: Role | None, device: torch.device) -> Tensor:
    """An uninitialized buffer [numel] that `buffer_observers` are called with, unless it has no role."""
    buffer = torch.empty(numel, dtype=dtype, device=device)
    if role is not None:
        retag(buffer, role)
    return buffer


def retag(buffer: Tensor, role: Role) -> None:
    """Change the role that a buffer of `empty` is counted under."""
    for observe in buffer_observers:
        observe(buffer, role)


def allocate(buffer: Tensor) -> None:
    """Give a freed buffer its memory back, uninitialized; on CUDA it belongs to the current stream's pool."""
    buffer.untyped_storage().resize_(buffer.nbytes)


def record_stream(buffer: Tensor) -> None:
    """After the buffer is freed, hold back its memory until the current stream has finished the work queued by then.

    The caching allocator knows the stream on which a block was allocated, and gives the block to the next user on that
    stream at once. It knows of other streams that read the block only through this call (`Tensor.record_stream`).
    """
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
    elif command_observers:
        _tell("record_stream", _streams[-1], buffer)


def free(buffer: Tensor) -> None:
    """Release the buffer's memory.

    Kernels queued on the current stream may still read it, so the allocator has to hold back the block until they are
    done: memory freed here cannot be allocated again at once (fsdp/schedules/rate_limit.py).
    """
    storage = buffer.untyped_storage()
    if storage.nbytes():
        record_stream(buffer)
        storage.resize_(0)


def copy_to_host(tensor: Tensor, pin: bool = True) -> Tensor:
    """A copy in host memory; from CUDA, pinned if `pin`, and valid once the current stream has reached the copy."""
    if tensor.device.type == "cpu":
        copy = tensor.clone()  # `.cpu()` would not copy
        _tell("copy_to_host", _streams[-1], copy)
        return copy
    return torch.empty_like(tensor, device="cpu", pin_memory=pin).copy_(tensor, non_blocking=True)


def is_allocated(buffer: Tensor) -> bool:
    """True if the buffer has its memory; always true of a buffer without elements."""
    return buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size()


def memory_stats(device: torch.device) -> dict[str, int]:
    """Bytes allocated and reserved by the caching allocator, and its retries; empty on CPU, which has none."""
    if device.type != "cuda":
        return {}
    names = {
        "allocated": "allocated_bytes.all.current",
        "allocated_peak": "allocated_bytes.all.peak",
        "active": "active_bytes.all.current",
        "reserved": "reserved_bytes.all.current",
        "reserved_peak": "reserved_bytes.all.peak",
        "alloc_retries": "num_alloc_retries",
    }
    stats = torch.cuda.memory_stats(device)  # empty until something has used CUDA
    return {name: stats.get(theirs, 0) for name, theirs in names.items()}
