"""FSDP2 on a GPU on paper: two ways to give buffers back, without a hazard, and what each lets pile up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import RUNGS
from minifsdp.fsdp import PrefetchSchedule
from minifsdp.fsdp2 import Held, Recorded, use_schedule
from minifsdp.fsdp2.hooks import state_of
from minifsdp.fsdp2.prefetch import ListedPrefetch
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.instruments.machine import A100, record_steps, replay
from minifsdp.instruments.machine.program import Program
from minifsdp.instruments.machine.replay import Run
from minifsdp.trainer import Trainer

SETTINGS = Settings(ranks=2, layers=5, width=128)
SLOW = replace(  # so that the host runs far ahead
    A100,
    flops={each: flops / 400 for each, flops in A100.flops.items()},
    memory_bandwidth=A100.memory_bandwidth / 40,
    issue=20e-6,
)


class Careless(Held):
    """Gives back without a wait."""

    def clear(self) -> None:
        for buffer, _ in self._kept:
            buffer.untyped_storage().resize_(0)
        self._kept.clear()


def one_by_one(model: GPT, limit: int, schedule: Any, keeper: Any) -> Trainer:
    trainer = RUNGS["fsdp2"].build(model, limit)
    use_schedule(trainer.model, schedule, keeper)
    return trainer


WAYS: dict[str, Callable[..., Trainer]] = {
    "recorded, limited": RUNGS["fsdp2"].build,
    "recorded": partial(one_by_one, schedule=PrefetchSchedule, keeper=Recorded),
    "held": RUNGS["fsdp2-hold"].build,
    "held, copied out first": partial(one_by_one, schedule=ListedPrefetch, keeper=Held),
    "careless": partial(one_by_one, schedule=PrefetchSchedule, keeper=Careless),
}


def record() -> dict[str, Program]:
    batch = next(SETTINGS.batches())
    return {name: record_steps(partial(build, SETTINGS.model(), 2), batch) for name, build in WAYS.items()}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    with patch.dict("os.environ", MINIFSDP_DEVICE="cpu"):
        programs = launch(record, 2, backend="gloo")[0]
    return {name: replay(program, SLOW) for name, program in programs.items()}


@pytest.mark.parametrize("name", ["recorded, limited", "recorded", "held", "held, copied out first"])
def test_no_wait_is_missing(runs: dict[str, Run], name: str) -> None:
    assert runs[name].hazards == []


def test_memory_given_back_without_a_wait_is_overwritten(runs: dict[str, Run]) -> None:
    assert runs["careless"].hazards != []


def test_what_is_held_is_all_that_is_active(runs: dict[str, Run]) -> None:
    """What is recorded stays active after its free, and piles up unless the host is stopped."""
    behind = {name: run.peak("active") - run.peak("allocated") for name, run in runs.items()}
    assert behind["held"] == 0
    assert behind["recorded"] > behind["recorded, limited"] > 0
    assert runs["held"].peak("reserved") < runs["recorded"].peak("reserved")
    assert runs["held"].peak("active") < runs["recorded"].peak("active")


def test_a_copy_out_before_the_next_gather_saves_a_buffer(runs: dict[str, Run]) -> None:
    """When memory is fullest, as backward begins, there are a whole unit and the gather of the next."""
    block = sum(p.numel() for p in SETTINGS.model().blocks[0].parameters()) * 4
    assert runs["held"].peak("allocated") - runs["held, copied out first"].peak("allocated") == block
    assert runs["held, copied out first"].peak("active") == runs["held, copied out first"].peak("allocated")


class Noted(Careless):
    """Holds on CPU, too, where nothing runs behind and no wait is needed."""

    def keep(self, buffer: Tensor) -> None:
        self._kept.append((buffer, None))


def held_in_and_after_forward() -> list[int]:
    trainer = one_by_one(SETTINGS.model(), 2, schedule=PrefetchSchedule, keeper=Noted)
    during: list[int] = []
    state = state_of(trainer.model)
    state.start()
    keeper = state.gathers
    assert isinstance(keeper, Noted)
    trainer.model.head.register_forward_hook(lambda *_: during.append(len(keeper._kept)))
    trainer.model(*next(SETTINGS.batches()))
    return [*during, len(keeper._kept)]


def test_no_buffer_of_a_gather_is_held_after_forward() -> None:
    """The last gather of forward is followed by none before backward, which may come much later."""
    with patch.dict("os.environ", MINIFSDP_DEVICE="cpu"):
        assert launch(held_in_and_after_forward, 2, backend="gloo") == [[1, 0]] * 2


def test_neither_costs_time(runs: dict[str, Run]) -> None:
    assert runs["held"].seconds == pytest.approx(runs["recorded"].seconds, rel=0.02)
    assert runs["held, copied out first"].seconds == pytest.approx(runs["held"].seconds, rel=0.02)
