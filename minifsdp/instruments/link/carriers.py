"""An emulated link's carrier on CPU, a thread, and the parts shared with CUDA's (stream_carrier.py).

Both take messages one at a time, in order of submission, and run the real collective at the end of a message's time.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from typing import Any, NamedTuple

import torch

from minifsdp.comm import Call

Seconds = Callable[[Call], float]
"""The least time of a message."""

TWO_SIDED = ("send", "recv")  # a rank has both under way at once: their peers' halves are outside the link's order


class Transfer(NamedTuple):
    """One message as the link carried it.

    Attributes:
        op: the logical operation, such as `"all_gather"`.
        payload: bytes of the full tensor, as in `comm.Call`.
        start: when the link took it up, in seconds of `time.perf_counter`.
        end: when it had arrived, likewise.
        group: the process group's name.
    """

    op: str
    payload: int
    start: float
    end: float
    group: str = ""


class Costs:
    """The cost of the real collectives, learnt as they run, so that they can end when their message's time does.

    It is the median of the last few of a kind and size, so an occasional wait for a late peer does not distort it. A
    rank that always waits ends up running its collectives early, and the peer still determines when they end.
    """

    def __init__(self) -> None:
        self._last: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=7))

    def expected(self, call: Call) -> float:  # seconds
        last = self._last[call.op, call.payload]
        return median(last) if last else 0.0

    def learn(self, call: Call, seconds: float) -> None:
        self._last[call.op, call.payload].append(seconds)


class _Message:
    """A collective on its way; `arrived` holds the rest to wait for: nothing, or a send or receive under way."""

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
        self._costs = Costs()
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
        """Carry the queued messages and end the thread; or `abandon` them, if peers may never answer."""
        if abandon:
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
        self._queue.put(None)
        if not abandon:
            self._thread.join()

    def _carry_all(self) -> None:
        torch.set_grad_enabled(False)  # for this thread, as for the caller at submission
        while (message := self._queue.get()) is not None:
            try:
                message.arrived.set_result(self._carry(message))
            except BaseException as error:
                self._free_at = time.perf_counter()
                message.arrived.set_exception(error)
            del message  # or the last message's buffers would live until the next

    def _carry(self, message: _Message) -> Any:
        """Start the message at its time by the emulated clock: a late wake-up of this thread delays no later one."""
        call, collective = message.call, message.collective
        seconds = self._seconds(call)
        start = max(message.issued, self._free_at)
        due = start + seconds
        _sleep_until(due - self._costs.expected(call))
        woken = time.perf_counter()
        work, left = collective(), None
        if call.op in TWO_SIDED:
            left = work  # a ring's ranks all send before they receive: waiting here for the peer would deadlock
        else:
            work.wait()
        took = time.perf_counter() - woken
        self._costs.learn(call, min(took, seconds))
        self._free_at = end = due if took <= seconds else woken + took
        _sleep_until(end)
        self._transfers.append(Transfer(call.op, call.payload, start, end, call.group))
        return left


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))
