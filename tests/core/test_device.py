"""On CPU streams and events do nothing, and observers get the commands for a device with queues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minifsdp import device
from minifsdp.device import Command, CpuEvent, CpuStream

CPU = torch.device("cpu")


@pytest.fixture
def heard() -> Iterator[list[Command]]:
    commands: list[Command] = []
    device.command_observers.append(commands.append)
    yield commands
    device.command_observers.remove(commands.append)


def verbs(commands: list[Command]) -> list[tuple[str, Any]]:
    return [(command.verb, command.stream) for command in commands]


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [
        (1, 2, "cuda:1"),
        ("cuda:1", 2, "cuda:1"),
        (torch.device("cuda", 1), 2, "cuda:1"),
        (CUDA, 1, "cuda"),
        ("cpu", 0, "cpu"),
        (CPU, 0, "cpu"),
        ("meta", 0, "meta"),
        (0, 0, "arg=0 is a CUDA device, and there is none here: leave arg out, or pass torch.device('cpu')"),
        (
            CUDA,
            0,
            "arg=device(type='cuda') is a CUDA device, and there is none here: leave arg out, or pass "
            "torch.device('cpu')",
        ),
        (2, 2, "arg=2: CUDA devices are numbered from 0 to 1 here"),
        ("cuda:1", 1, "arg='cuda:1': CUDA devices are numbered from 0 to 0 here"),
        (-1, 2, "arg=-1: give a device, or the index of a CUDA device"),
        (True, 2, "arg=True: give a device, or the index of a CUDA device"),
        (1.5, 2, "arg=1.5: give a device, or the index of a CUDA device"),
        ("gpu", 2, "arg='gpu': give a device, or the index of a CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, there: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    if not expected.startswith("arg"):
        assert device.asked_for(wanted, "arg") == torch.device(expected)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        device.asked_for(wanted, "arg")


def test_the_current_stream_is_the_innermost() -> None:
    compute, outer, inner = device.current_stream(CPU), device.new_stream(CPU), device.new_stream(CPU, priority=-1)
    with device.on_stream(outer) as entered:
        assert entered is device.current_stream(CPU) is outer
        with device.on_stream(inner):
            assert device.current_stream(CPU) is inner
        assert device.current_stream(CPU) is outer
    assert device.current_stream(CPU) is compute


def test_an_exception_leaves_its_stream() -> None:
    compute = device.current_stream(CPU)
    with pytest.raises(KeyError), device.on_stream(CpuStream()):
        raise KeyError
    assert device.current_stream(CPU) is compute


def test_waiting_for_a_stream_is_an_event_there_and_a_wait_here(heard: list[Command]) -> None:
    one, other = CpuStream(), CpuStream()
    one.wait_stream(other)
    assert verbs(heard) == [("record", other), ("wait", one)]
    assert heard[0].subject is heard[1].subject


def test_events_go_to_the_current_stream_or_to_the_one_that_is_named(heard: list[Command]) -> None:
    here, there, event = CpuStream(), CpuStream(), device.new_event(CPU)
    with device.on_stream(here):
        event.record()
        event.wait()
        event.record(there)
        event.wait(there)
        there.wait_event(event)
    assert verbs(heard) == [("record", here), ("wait", here), ("record", there), ("wait", there), ("wait", there)]
    assert all(command.subject is event for command in heard)
    own = there.record_event()
    assert heard[-1] == Command("record", there, own)


def test_a_host_that_synchronizes_is_on_no_stream(heard: list[Command]) -> None:
    event = CpuEvent()
    event.synchronize()
    assert heard == [Command("synchronize", None, event)]
    assert event.query()


def test_a_host_that_waits_for_the_device_waits_for_no_event(heard: list[Command]) -> None:
    device.synchronize(CPU)
    assert heard == [Command("synchronize", None, CPU)]


def test_a_buffer_that_is_freed_was_in_use_on_the_current_stream(heard: list[Command]) -> None:
    buffer, side = device.empty(4, torch.float32, "unsharded", CPU), CpuStream()
    with device.on_stream(side):
        device.free(buffer)
        device.free(buffer)  # it has no memory any more
    assert len(heard) == 1
    verb, stream, subject = heard[0]
    assert (verb, stream) == ("record_stream", side)
    assert subject is buffer
    device.allocate(buffer)
    device.record_stream(buffer)
    assert verbs(heard)[1:] == [("record_stream", device.current_stream(CPU))]


def test_times_between_events_are_in_milliseconds() -> None:
    begin, end = CpuEvent(), CpuEvent()
    begin.at, end.at = 1.0, 1.5
    assert begin.elapsed_time(end) == 500
    begin.record()
    end.record()
    assert begin.elapsed_time(end) >= 0


def test_every_watcher_hears_and_nobody_has_to(heard: list[Command]) -> None:
    again: list[Command] = []
    device.command_observers.append(again.append)
    CpuStream().record_event()
    device.command_observers.remove(again.append)
    CpuStream().record_event()
    assert len(again) == 1
    assert len(heard) == 2
