"""The emulated link on CUDA, with stand-ins for a device: who waits for whom, and how long a message takes.

Each stream has a clock of its own, in seconds of the device; nothing here has run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch

from minifsdp import device
from minifsdp.comm import Call
from minifsdp.instruments.link.carriers import Transfer
from minifsdp.instruments.link.stream_carrier import StreamCarrier

MIB = 2**20
IDLE, BOOST = 345e6, 1980e6  # cycles per second of a GPU that has nothing to do, and of one that has


class FakeStream:
    """`at`: when all that is queued here so far is over."""

    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name, self.cuda, self.at = name, cuda, 0.0

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")
        self.at = max(self.at, other.at)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")
        self.at = max(self.at, event.at)

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.stream, self.at = cuda, cuda.current, 0.0

    def record(self) -> None:
        self.stream, self.at = self.cuda.current, self.cuda.current.at

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.at <= self.cuda.host

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


class FakeCuda:
    """A device whose kernels take their time one after the other on each stream.

    Attributes:
        rate: cycles per second at a moment.
        launch: seconds that a kernel takes beside its work.
        stall: seconds of another process's turn, in the next spin of more than 2 ms.
        host: the moment at which the host looks whether an event has happened.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.rate: Callable[[float], float] = lambda moment: 1e9
        self.launch = self.stall = 0.0
        self.host = inf
        self.compute = self.current = FakeStream("compute", self)
        self._names = iter(("link", "floor", *[f"more {number}" for number in range(9)]))

    def new_stream(self, where: torch.device, priority: int = 0) -> FakeStream:
        return FakeStream(next(self._names), self)

    def stream(self, stream: FakeStream) -> Any:
        cuda = self

        class Current:
            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, stream

            def __exit__(self, *exc: object) -> None:
                cuda.current = self.before

        return Current()

    def spin(self, cycles: int) -> None:
        seconds = cycles / self.rate(self.current.at)
        if seconds > 2e-3 and self.stall:
            seconds, self.stall = seconds + self.stall, 0.0
        self.current.at += self.launch + seconds
        self.log.append(f"{self.current.name} spins {1e3 * seconds:.4g} ms")

    def collective(self, seconds: float) -> Any:
        """A real one that takes so long; on NCCL's stream, for which the current one waits."""
        return Work(self, self.current.at + seconds)


class Work:
    def __init__(self, cuda: FakeCuda, done: float) -> None:
        self.cuda, self.done = cuda, done
        cuda.log.append(f"{cuda.current.name} issues the collective")

    def wait(self) -> None:
        self.cuda.log.append(f"{self.cuda.current.name} waits for the collective")
        self.cuda.current.at = max(self.cuda.current.at, self.done)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(device, "new_stream", fake.new_stream)
    monkeypatch.setattr(device, "new_event", lambda where: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.spin)
    return fake


def carrier_of(seconds: float) -> tuple[StreamCarrier, list[Transfer]]:
    """A link on which every message takes so long, but a receive nothing."""
    transfers: list[Transfer] = []
    return StreamCarrier(lambda call: 0.0 if call.op == "recv" else seconds, transfers), transfers


def call(order: int, op: str = "all_gather") -> Call:
    return Call(op, f"{op}_single", "0", order, MIB, ranks=2)


def carried(cuda: FakeCuda, seconds: float, reals: list[float]) -> list[float]:
    """How long each message took, in seconds, with real collectives that take `reals`."""
    carrier, transfers = carrier_of(seconds)
    for order, real in enumerate(reals):
        carrier.submit(call(order), lambda real=real: cuda.collective(real)).wait()
    carrier.close(abandon=False)
    return [transfer.end - transfer.start for transfer in transfers]


def test_the_collective_is_delayed_on_a_stream_of_its_own(cuda: FakeCuda) -> None:
    carrier, transfers = carrier_of(0.1)
    cuda.log.clear()
    message = carrier.submit(call(0), lambda: cuda.collective(0.03))
    assert cuda.log == [
        "link waits for compute",  # what it reads is written there
        "floor waits for link",
        "floor spins 100 ms",
        "link spins 100 ms",
        "link issues the collective",
        "link waits for the collective",  # the next message starts after it
        "link waits for floor",
    ]
    cuda.log.clear()
    message.wait()
    assert cuda.log == ["compute waits for an event of link"]  # and the host for nothing

    carrier.submit(call(1), lambda: cuda.collective(0.03))
    assert "link spins 70 ms" in cuda.log  # so that delay and collective take 100 ms together
    carrier.close(abandon=False)
    assert [t.end - t.start for t in transfers] == pytest.approx([0.13, 0.1])


def test_no_message_is_faster_than_the_link_whatever_the_collectives_before_it_took(cuda: FakeCuda) -> None:
    """The first of a kind connects, or waits for a late peer; the next are quick."""
    reals = [50e-3, 0.1e-3, 0.1e-3, 0.1e-3, 3e-3, 0.1e-3]
    late = 10.14e-3  # delayed as if it took the 0.1 ms of those before
    assert carried(cuda, 7.24e-3, reals) == pytest.approx([57.24e-3, *[7.24e-3] * 3, late, 7.24e-3], rel=1e-4)


def test_the_clock_is_measured_again_in_every_message(cuda: FakeCuda) -> None:
    """A GPU that idles when the link is opened: its clock rises only after a second's work."""
    cuda.rate = lambda moment: IDLE if moment < 1 else BOOST
    carrier, transfers = carrier_of(10e-3)
    cuda.compute.at = 1.0
    cuda.host = 0.0  # the first message is still under way when the second is issued
    for order in range(4):
        carrier.submit(call(order), lambda: cuda.collective(0.0)).wait()
        cuda.host = inf if order else 0.0
    carrier.close(abandon=False)
    took = [transfer.end - transfer.start for transfer in transfers]
    assert took[0] == pytest.approx(10e-3 * IDLE / BOOST, rel=1e-2)
    assert took[2:] == pytest.approx([10e-3, 10e-3], rel=1e-3)


def test_a_clock_that_rises_while_it_is_measured_is_measured_until_it_stands(cuda: FakeCuda) -> None:
    cuda.rate = lambda moment: IDLE if moment < 0.15 else BOOST
    assert carried(cuda, 10e-3, [0.0]) == pytest.approx([10e-3], rel=1e-3)


def test_what_a_launch_takes_is_no_part_of_the_clock(cuda: FakeCuda) -> None:
    cuda.launch = 5e-6
    for took in carried(cuda, 10e-3, [0.0] * 4):
        assert 10e-3 <= took < 10.02e-3


def test_another_processs_turn_on_the_gpu_does_not_make_the_clock_slow(cuda: FakeCuda) -> None:
    carrier, transfers = carrier_of(10e-3)
    cuda.stall = 5e-3
    for order in range(3):
        carrier.submit(call(order), lambda: cuda.collective(0.0)).wait()
    carrier.close(abandon=False)
    assert [t.end - t.start for t in transfers] == pytest.approx([15e-3, 10e-3, 10e-3], rel=1e-3)


def test_a_send_and_a_receive_pass_each_other(cuda: FakeCuda) -> None:
    """A step of ring.py between two ranks, one of which receives first, takes the time of one message."""
    even, odd = carrier_of(10e-3)[0], carrier_of(10e-3)[0]
    computes = {even: FakeStream("even", cuda), odd: FakeStream("odd", cuda)}
    sent: dict[StreamCarrier, float] = {}

    class Received(Work):
        def __init__(self, source: StreamCarrier) -> None:
            super().__init__(cuda, 0.0)
            self.source = source

        def wait(self) -> None:  # there once the other rank has sent it
            self.done = sent[self.source]
            super().wait()

    def send(rank: StreamCarrier) -> Work:
        sent[rank] = cuda.current.at
        return Work(cuda, cuda.current.at)

    messages = []
    program = [(even, "send", odd), (odd, "recv", even), (odd, "send", even), (even, "recv", odd)]
    for order, (rank, op, peer) in enumerate(program):
        issue = (lambda rank=rank: send(rank)) if op == "send" else (lambda peer=peer: Received(peer))
        with cuda.stream(computes[rank]):
            messages.append((rank, rank.submit(call(order, op), issue)))
    for rank, message in messages:
        with cuda.stream(computes[rank]):
            message.wait()
    assert [stream.at for stream in computes.values()] == pytest.approx([10e-3, 10e-3], rel=1e-3)
