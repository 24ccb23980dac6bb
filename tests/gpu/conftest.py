"""Tests on GPUs: skipped elsewhere, each with the reason, and the world that they run in.

Values are compared on two NCCL ranks: with a GPU each where there are two, else on one GPU that they share. What
concerns streams, memory and the host alone runs there too, or, where ranks cannot share a GPU, as rank 0 of a `fake`
world. Files are not to run beside each other: they measure.
"""

from __future__ import annotations

import pytest
import torch
from on_gpu import Way, reason_to_skip, sum_over_ranks

from minifsdp.instruments.launch import RankError


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := reason_to_skip(several=item.get_closest_marker("multigpu") is not None):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def world() -> Way:
    """Two NCCL ranks, tried with a small all-reduce; `fake` with the reason, where that fails."""
    how = "sharing a GPU" if torch.cuda.device_count() < 2 else "with a GPU each"
    try:
        sums = Way("nccl").start(sum_over_ranks, 2)
        failed = "" if sums == [2, 2] else f"their ones sum to {sums}"
    except (RankError, ValueError, RuntimeError) as error:
        failed = str(error).strip().splitlines()[0]
    return Way("fake", f"two NCCL ranks {how} do not work here ({failed})") if failed else Way("nccl")


@pytest.fixture
def world_of_values(world: Way) -> Way:
    """For what compares values, which `fake` has none of."""
    if world.backend != "nccl":
        pytest.skip(world.why)
    return world


@pytest.fixture
def alone() -> Way:
    """Rank 0 of a `fake` world, wherever NCCL works: for what is timed, or seen by the sanitizer.

    Two processes on one GPU take turns, so that one's computation would stand in the other's communication.
    """
    return Way("fake")
