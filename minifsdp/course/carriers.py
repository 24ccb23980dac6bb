"""How an emulated link carries messages: by a thread on CPU, on a stream on CUDA.

Both take messages one at a time, in order of submission, and run the real collective at the end of a message's time.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from typing import Any, NamedTuple

import torch

from minifsdp import device
from minifsdp.comm import Call
from minifsdp.private import spin

Seconds = Callable[[Call], float]
"""What a message takes at least."""


class Transfer(NamedTuple):
    """One message as the link carried it.

    Attributes:
        op: the logical operation, such as `"all_gather"`.
        payload: bytes of the full tensor, as in `comm.Call`.
        start: when the link took it up, in seconds of `time.perf_counter`.
        end: when it had arrived, likewise.
    """

    op: str
    payload: int
    start: float
    end: float


class _Costs:
    """What the real collectives cost, learnt as they run, so that they can end when their message's time does.

    The median of the last few by kind and size: a rank that waits for a late peer now and then does not mislead it. One
    that always waits comes to run its collectives early, and the peer still says when they end.
    """

    def __init__(self) -> None:
        self._last: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=7))

    def expected(self, call: Call) -> float:  # seconds
        last = self._last[call.op, call.payload]
        return median(last) if last else 0.0

    def learn(self, call: Call, seconds: float) -> None:
        self._last[call.op, call.payload].append(seconds)


class _Message:
    """A collective on its way; `arrived` holds what is left to wait for: nothing, or a send or receive under way."""

    __slots__ = ("arrived", "call", "collective", "issued")

    def __init__(self, call: Call, collective: Callable[[], Any]) -> None:
        self.call = call
        self.collective = collective
        self.issued = time.perf_counter()
        self.arrived: Future[Any] = Future()

    def wait(self) -> None:
        left = self.arrived.result()
        if left is not None:
            left.wait()


class ThreadCarrier:
    """The link on CPU: one thread that sleeps through a message's time and runs the real collective at its end."""

    def __init__(self, seconds: Seconds, transfers: list[Transfer]) -> None:
        self._seconds, self._transfers = seconds, transfers
        self._costs = _Costs()
        self._free_at = 0.0  # when the last message has left the link, by the emulated clock
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        # A daemon: a collective whose peer has died must not keep this rank alive.
        self._thread = Thread(target=self._carry_all, name="emulated-link", daemon=True)
        self._thread.start()

    def submit(self, call: Call, collective: Callable[[], Any]) -> _Message:
        message = _Message(call, collective)
        self._queue.put(message)
        return message

    def close(self, abandon: bool) -> None:
        """Carry what is queued and end the thread; or `abandon` it, where peers may never answer."""
        if abandon:
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
        self._queue.put(None)
        if not abandon:
            self._thread.join()

    def _carry_all(self) -> None:
        torch.set_grad_enabled(False)  # of this thread, as the caller's was when it issued
        while (message := self._queue.get()) is not None:
            try:
                message.arrived.set_result(self._carry(message))
            except BaseException as error:
                self._free_at = time.perf_counter()
                message.arrived.set_exception(error)
            del message  # or the buffers of the last one would live until the next

    def _carry(self, message: _Message) -> Any:
        """Take the message up at its time by the emulated clock: that this thread woke late delays no later one."""
        call, collective = message.call, message.collective
        seconds = self._seconds(call)
        start = max(message.issued, self._free_at)
        due = start + seconds
        _sleep_until(due - self._costs.expected(call))
        woken = time.perf_counter()
        work, left = collective(), None
        if call.op in ("send", "recv"):
            left = work  # a ring's ranks all send before they receive: to wait here for the peer would be to deadlock
        else:
            work.wait()
        took = time.perf_counter() - woken
        self._costs.learn(call, min(took, seconds))
        self._free_at = end = due if took <= seconds else woken + took
        _sleep_until(end)
        self._transfers.append(Transfer(call.op, call.payload, start, end))
        return left


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class _Kernels:
    """A collective queued on the link's stream, between timed events.

    `collective` holds its tensors until it is waited for: NCCL lets go of them when the link's stream waits, which is
    too early for the caller's.
    """

    __slots__ = ("call", "collective", "delayed", "end", "start")

    def __init__(self, call: Call, collective: Callable[[], Any], start: Any, delayed: Any, end: Any) -> None:
        self.call = call
        self.collective: Callable[[], Any] | None = collective
        self.start, self.delayed, self.end = start, delayed, end

    def wait(self) -> None:
        """The current stream waits for the collective, and the host runs on."""
        torch.cuda.current_stream().wait_event(self.end)
        self.collective = None


class StreamCarrier:
    """The link on CUDA: a stream on which a kernel spins for a message's time before the real collective runs."""

    def __init__(self, seconds: Seconds, transfers: list[Transfer]) -> None:
        self._seconds, self._transfers = seconds, transfers
        self._costs = _Costs()
        self._stream = device.new_stream(torch.device("cuda"), priority=-1)  # as NCCL's, among kernels that compute
        self._cycles = _cycles_per_second()
        self._under_way: deque[_Kernels] = deque()
        torch.cuda.synchronize()
        self._origin, self._origin_at = _event(), time.perf_counter()

    def submit(self, call: Call, collective: Callable[[], Any]) -> _Kernels:
        self._collect()
        delay = max(0.0, self._seconds(call) - self._costs.expected(call))
        self._stream.wait_stream(torch.cuda.current_stream())  # what the collective reads is written there
        with torch.cuda.stream(self._stream):
            start = _event()
            spin(int(delay * self._cycles))
            delayed = _event()
            collective().wait()  # the link's stream waits, so that messages do not overtake
            kernels = _Kernels(call, collective, start, delayed, _event())
        self._under_way.append(kernels)
        return kernels

    def close(self, abandon: bool) -> None:
        if not abandon:
            self._stream.synchronize()
            self._collect()

    def _collect(self) -> None:
        """List the messages that are over, and learn from them; the host waits for none."""
        while self._under_way and self._under_way[0].end.query():
            done = self._under_way.popleft()
            self._costs.learn(done.call, min(done.delayed.elapsed_time(done.end) / 1e3, self._seconds(done.call)))
            start, end = (self._origin_at + self._origin.elapsed_time(at) / 1e3 for at in (done.start, done.end))
            self._transfers.append(Transfer(done.call.op, done.call.payload, start, end))


def _event() -> Any:
    """A timed event, recorded on the current stream."""
    event = device.new_event(torch.device("cuda"))
    event.record()
    return event


def _cycles_per_second() -> float:
    """Clock rate that `spin` counts by, once the clock is up: the fastest of some spins of about a millisecond.

    Another rank on the same GPU interrupts a long one, for milliseconds at a time, and would make the clock look slow.
    """
    spin(20_000_000)
    cycles, marks = 2_000_000, [_event()]
    for _ in range(16):
        spin(cycles)
        marks.append(_event())
    marks[-1].synchronize()
    fastest: float = min(before.elapsed_time(after) for before, after in pairwise(marks))  # milliseconds
    return cycles / (fastest / 1e3)
