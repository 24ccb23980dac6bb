"""The CUDA stream sanitizer finds no race in a training step, and finds one as soon as a wait is forgotten.

Each in a process of its own, rank 0 of a `fake` world: the sanitizer is the process's, and what it has seen stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from on_gpu import ON_GPU, Way
from racing import BEFORE, FORGETTING, SCHEDULES, find_races, forget_none

from minifsdp.fsdp import OverlapSchedule

pytestmark = ON_GPU


@contextmanager
def sanitized() -> Iterator[None]:
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    try:
        yield
    finally:
        _sanitizer.cuda_sanitizer.disable()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_no_race_in_a_step(alone: Way, schedule: Any, record_property: Callable[[str, object], None]) -> None:
    record_property("world", str(alone.world(2)))
    assert alone.start(find_races, 2, schedule, forget_none, sanitized) == [[]]


@pytest.mark.parametrize("wait", FORGETTING)
def test_a_forgotten_wait_is_found(alone: Way, wait: str, record_property: Callable[[str, object], None]) -> None:
    record_property("world", str(alone.world(2)))
    (found,) = alone.start(find_races, 2, OverlapSchedule, FORGETTING[wait], sanitized)
    assert [before for _, before in found] == [BEFORE[wait]]
