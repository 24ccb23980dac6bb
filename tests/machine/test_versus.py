"""The model beside the clock: what is predicted follows from compute and messages; one real launch."""

from functools import partial
from statistics import median

import pytest

from minifsdp.comm import Call
from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, SyncSchedule
from minifsdp.instruments.launch import RankError
from minifsdp.instruments.machine import measured, replay
from minifsdp.instruments.machine.program import Issue, Kernel, Mark, Program, Wait
from minifsdp.instruments.machine.versus import Versus, _evened, gains, versus

LATENCY, BANDWIDTH = 2e-3, 50e6
PAYLOADS = (1_000_000, 0, 300_000)
KERNELS = (0.01, 0.02)  # seconds, as recorded
KERNEL = Kernel("mm", "root", 0, (), (), 0, 0, 4, 0.0)


def program(waits_at_once: bool, steps: int = 2) -> Program:
    """Messages, waited for where they are issued or after all kernels, between kernels that differ."""
    instructions = []
    for step in range(steps):
        instructions.append(Mark("step"))
        calls = [
            Call("all_gather", "f", "0", step * len(PAYLOADS) + number, nbytes, 4)
            for number, nbytes in enumerate(PAYLOADS)
        ]
        for call in calls:
            instructions.append(Issue(call, "root", 0, (), ()))
            instructions += [Wait(call, 0)] if waits_at_once else []
            instructions += [KERNEL._replace(seconds=seconds) for seconds in KERNELS]
        instructions += [] if waits_at_once else [Wait(call, 0) for call in calls]
    return Program(instructions, {})


def predicted(recorded: Program, computing: float) -> float:
    return Versus([1.0], computing, recorded, measured(recorded, LATENCY, BANDWIDTH, 2 * computing)).predicted


MESSAGES = sum(LATENCY + 3 / 4 * nbytes / BANDWIDTH for nbytes in PAYLOADS)


@pytest.mark.parametrize("computing", [0.001, 0.05, 0.3])
def test_what_waits_at_once_takes_compute_and_messages_together(computing: float) -> None:
    assert predicted(program(waits_at_once=True), computing) == pytest.approx(computing + MESSAGES)


@pytest.mark.parametrize("computing", [0.001, 0.05, 0.3])
def test_what_waits_at_the_end_takes_the_longer_of_the_two(computing: float) -> None:
    seconds = predicted(program(waits_at_once=False), computing)
    first = 1e-9 + computing / len(PAYLOADS)  # what may come after the last message or before it
    assert max(computing, MESSAGES) - 1e-9 < seconds < max(computing, MESSAGES) + first


def test_a_gain_is_taken_in_the_same_turn_and_of_the_other_s_step() -> None:
    recorded = program(waits_at_once=True)
    hardware = measured(recorded, LATENCY, BANDWIDTH, 0.2)
    one, other = (Versus(seconds, 0.1, recorded, hardware) for seconds in ([0.9, 3.0, 1.0], [1.0, 2.0, 2.0]))
    assert gains(one, other) == pytest.approx([-0.5, 0.1, 0.5])  # the machine was busy in the later turns: of no matter


def test_the_error_is_of_the_median_and_negative_if_the_model_is_short() -> None:
    recorded = program(waits_at_once=True)
    hardware = measured(recorded, LATENCY, BANDWIDTH, 0.2)
    result = Versus([3.0, 2 * (0.1 + MESSAGES), 0.001], 0.1, recorded, hardware)
    assert result.median == 2 * (0.1 + MESSAGES)
    assert result.error == pytest.approx(-0.5)


def test_a_kernel_that_was_held_up_while_recorded_is_as_the_others_of_its_kind() -> None:
    kernels = [KERNEL._replace(seconds=seconds, flops=flops) for seconds, flops in [(1, 0), (9, 0), (1, 0), (5, 7)]]
    evened = _evened(Program([Mark("step"), *kernels], {})).instructions
    assert evened[0] == Mark("step")
    assert [kernel.seconds for kernel in evened[1:]] == [1, 1, 1, 5]


class Broken(SyncSchedule):
    def post_forward(self, unit, is_last):
        raise AssertionError("no forward today")


SETTINGS = Settings(ranks=2, batch=4, layers=2, width=35, context=8)


def test_all_schedules_are_timed_and_predicted_in_one_launch() -> None:
    class Mine(OverlapSchedule):
        """Defined here, as in a notebook."""

    schedules = {"sync": SyncSchedule, "mine": Mine, "prefetch": partial(PrefetchSchedule, depth=None)}
    results = versus(SETTINGS, schedules, "latency=3ms,bandwidth=1GB/s", steps=3)
    assert list(results) == list(schedules)
    for name, result in results.items():
        assert len(result.measured) == 3
        assert result.median == median(result.measured)
        assert 0 < result.computing < max(result.measured)
        assert result.error == result.predicted / result.median - 1
        assert result.predicted == replay(result.program, result.hardware).seconds
        assert [name for name, _ in result.program.marked()].count("step") == 2
        assert not result.run.hazards, name
        assert result.hardware.latency == 3e-3
    calls = {name: sorted(call.op for call in result.program.calls()) for name, result in results.items()}
    assert calls["sync"] == calls["mine"] == calls["prefetch"]
    alone = results["sync"]  # which hides nothing: every message is waited for
    messages = [alone.hardware.message(call) for call in alone.program.calls()[len(alone.program.calls()) // 2 :]]
    assert alone.predicted > sum(messages)
    assert all(seconds > sum(messages) for seconds in alone.measured)


def test_a_link_that_is_none_is_refused_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="bad link 'fast'"):
        versus(SETTINGS, {"sync": SyncSchedule}, "fast")


def test_a_schedule_that_raises_is_named() -> None:
    with pytest.raises(RankError, match="no forward today"):
        versus(SETTINGS, {"broken": Broken}, steps=1)
