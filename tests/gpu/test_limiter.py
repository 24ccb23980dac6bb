"""The rate limiter where it is needed: a host that runs ahead, and an allocator whose memory is capped.

Without it the host frees and gathers unit after unit while the device is still at the first; a block that the device
may yet read is not to be had, so the allocator takes another, until the cap stops it. Then it waits for the device,
gives everything back that nobody uses, and tries again: a retry (`num_alloc_retries`). With the limiter the host waits
before that, for an event, and two units' memory is enough.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from heavy_model import Layers, Size, Stack
from on_gpu import ON_GPU, Figures, GpuChecks, Way
from torch.optim import SGD

from minifsdp import device
from minifsdp.fsdp import FullyShardedDataParallel, PrefetchSchedule, RateLimitedSchedule
from minifsdp.instruments.launch import rank_device

pytestmark = ON_GPU
check = GpuChecks(__name__, seconds=160)

MIB, STEPS = 2**20, 3
SIZE = Size(units=12, layers=2, width=2048, rows=8192)  # a unit: 32 MiB; 5 TFLOP a step
SMALL = Size(units=3, layers=1, width=8, rows=4)  # on CPU, where the code is to run and no more
LIMITED, UNLIMITED = RateLimitedSchedule, PrefetchSchedule  # both one unit ahead: what is in use at once is the same


class Run(NamedTuple):
    """Losses of the steps, the most bytes that the allocator held meanwhile, and how often it had to try again."""

    losses: list[float]
    reserved: int
    retries: int


def train(schedule: Any, size: Size, cap: int | None = None) -> Run:
    """`STEPS` steps, with at most `cap` bytes for the allocator once the model is there."""
    where = rank_device()
    x = size.batch()
    model = FullyShardedDataParallel(Stack(size).to(where), auto_wrap_policy={Layers}, schedule=schedule)
    optimizer = SGD(model.parameters(), 0.01)
    with Allocator(cap) as allocator:
        losses = []
        for _ in range(STEPS):
            losses.append(model(x))
            losses[-1].backward()
            losses[-1].detach_()
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize(where)
    return Run([float(loss) for loss in losses], allocator.reserved, allocator.retries)


class Allocator:
    """The caching allocator inside the `with`, which begins with nothing in its cache; no more than a name on CPU."""

    def __init__(self, cap: int | None) -> None:
        self.where, self.cap = rank_device(), cap
        self.reserved = self.retries = 0

    def __enter__(self) -> Allocator:
        if self.where.type == "cuda":
            gc.collect()
            device.synchronize(self.where)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.where)
            self.before = device.memory_stats(self.where)["alloc_retries"]
            if self.cap is not None:
                total = torch.cuda.get_device_properties(self.where).total_memory
                torch.cuda.set_per_process_memory_fraction(self.cap / total, self.where)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.where.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.where)
            stats = device.memory_stats(self.where)
            self.reserved, self.retries = stats["reserved_peak"], stats["alloc_retries"] - self.before


@check()
def under_a_cap_the_allocator_tries_again_unless_the_host_is_limited() -> Figures:
    """The cap lies halfway between what the two take where there is none, as measured here and now."""
    on_gpu = rank_device().type == "cuda"
    size = SIZE if on_gpu else SMALL
    train(LIMITED, size)  # communicators connect, libraries load
    limited, unlimited = train(LIMITED, size), train(UNLIMITED, size)
    cap = (limited.reserved + unlimited.reserved) // 2
    with_limiter, without = train(LIMITED, size, cap), train(UNLIMITED, size, cap)
    figures = {
        "limiter.reserved_with_mib": limited.reserved / MIB,
        "limiter.reserved_without_mib": unlimited.reserved / MIB,
        "limiter.cap_mib": cap / MIB,
        "limiter.retries_with": with_limiter.retries,
        "limiter.retries_without": without.retries,
    }
    if on_gpu:
        assert unlimited.reserved > limited.reserved + 2 * 32 * MIB, f"the host did not run ahead: {figures}"
        assert with_limiter.retries == 0, str(figures)
        assert without.retries > 0, str(figures)
    if dist.get_backend() != "fake":  # whose collectives nobody waits for
        assert limited.losses == unlimited.losses == with_limiter.losses == without.losses
    return figures


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str, world: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, world, record_property)
