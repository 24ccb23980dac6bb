"""Communication runs beside the computation: with collectives of a known length, and in one that does not, no test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from heavy_model import Size
from on_gpu import ON_GPU, Figures, GpuChecks, Way
from overlapping import measure

from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.instruments.launch import rank_device

pytestmark = ON_GPU
check = GpuChecks(__name__)

SIZE = Size(units=6, layers=4, width=512, rows=65536)  # 34 GFLOP a product, 3 GiB of inputs to keep
SMALL = Size(units=2, layers=1, width=8, rows=4)  # on CPU, where nothing is asserted of times
GAIN = 1.1
BESIDE: dict[str, Any] = {
    "overlap": OverlapSchedule,
    "prefetch": PrefetchSchedule,
    "limit": partial(RateLimitedSchedule, depth=None, limit=2),
}


@check(schedule=list(BESIDE))
def a_step_takes_less_than_its_parts(schedule: str) -> Figures:
    times = measure(BESIDE[schedule], SIZE if rank_device().type == "cuda" else SMALL)
    assert rank_device().type == "cpu" or times.gain > GAIN, times
    return times.figures("overlap" if schedule == "prefetch" else f"overlap.{schedule}")


@check()
def in_the_sync_schedule_it_takes_as_long() -> Figures:
    """So the other check can fail."""
    times = measure(SyncSchedule, SIZE if rank_device().type == "cuda" else SMALL)
    assert rank_device().type == "cpu" or times.gain < GAIN, times
    return times.figures("overlap.sync")


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_alone(ranks: int, name: str, alone: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, alone, record_property)


@pytest.mark.multigpu
@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_with_a_gpu_each(
    ranks: int, name: str, world_of_values: Way, record_property: Callable[[str, object], None]
) -> None:
    def tell(figure: str, value: object) -> None:
        record_property(figure if figure == "world" else f"multigpu.{figure}", value)

    check.assert_passed(ranks, name, world_of_values, tell)
