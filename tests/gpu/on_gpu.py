"""Checks that run on ranks with GPUs: as in on_ranks.py, but each launch goes on as long as the checks pass.

A check that fails on a GPU may leave a collective half done or the CUDA context broken, so its launch ends there, and
those after it get a launch of their own. A check may return figures for the record: `{"overlap.both_ms": 3.1}`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks

from minifsdp import device
from minifsdp.course.ladder.measure import align
from minifsdp.instruments.launch import RankError, launch, rank_device, report
from minifsdp.instruments.launch.world import Backend, World, choose_world

Figures = dict[str, float]

ON_GPU = [pytest.mark.gpu, pytest.mark.timeout(440)]  # the first test of a file runs all of its checks


class Way(NamedTuple):
    """How ranks are started.

    Attributes:
        backend: "nccl", "fake" or "gloo".
        why: the reason, if it is a special one.
    """

    backend: Backend
    why: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Of `launch` and `choose_world`; NCCL ranks share GPUs where there are too few."""
        return {"backend": self.backend, "share_gpu": True if self.backend == "nccl" else None}

    def world(self, ranks: int) -> World:
        """As the record names it."""
        world = choose_world(ranks, here=ranks, **self.options)
        return replace(world, why=self.why) if self.why else world

    def start(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0, **more: Any) -> list[Any]:
        """`launch` in this way."""
        return launch(fn, ranks, *args, timeout=timeout, **self.options, **more)


class GpuChecks(Checks):
    """A file's checks, collected as by `Checks`.

    Args:
        module: the file's `__name__`.
        seconds: what one launch may take.
    """

    def __init__(self, module: str, seconds: float = 300.0) -> None:
        super().__init__(module)
        self.seconds = seconds
        self._ended: dict[tuple[Way, int], dict[str, Figures | str]] = defaultdict(dict)

    def assert_passed(  # type: ignore[override]
        self, ranks: int, name: str, way: Way, tell: Callable[[str, Any], Any] = lambda name, value: None
    ) -> None:
        """Fail with what the launch said in which this check failed; `tell` gets the world and the check's figures.

        Launches all checks for this many ranks that have not run yet, this one included, until one fails.
        """
        tell("world", str(way.world(ranks)))
        ended = self._ended[way, ranks]
        while name not in ended:
            left = {each: fn for each, fn in self._checks[ranks].items() if each not in ended}
            ended |= run(left, ranks, way, self.seconds)
        outcome = ended[name]
        if isinstance(outcome, str):
            pytest.fail(outcome, pytrace=False)
        for figure, value in outcome.items():
            tell(figure, value)


def run(checks: dict[str, Any], ranks: int, way: Way, seconds: float) -> dict[str, Figures | str]:
    """One launch: rank 0's figures of each check that passed, and what was said when one failed."""
    figures: dict[str, Figures] = {}
    passed: dict[str, set[int]] = {name: set() for name in checks}

    def note(rank: int, said: Any) -> None:
        name, found = said
        passed[name].add(rank)
        if rank == 0:
            figures[name] = found

    processes = set(range(1 if way.backend == "fake" else ranks))
    failed: dict[str, Figures | str] = {}
    try:
        way.start(run_on_a_rank, ranks, checks, timeout=seconds, on_report=note)
    except RankError as error:
        # ranks go from check to check together, so the first that not all have passed is the one that failed
        name = next((name for name in checks if passed[name] != processes), list(checks)[-1])
        failed[name] = str(error)
    return {name: figures[name] for name in checks if passed[name] == processes and name not in failed} | failed


def run_on_a_rank(checks: dict[str, Callable[[], Figures | None]]) -> None:
    """Each from the same seed and with an empty cache, when all ranks have ended the one before."""
    where = rank_device()
    use_exact_arithmetic()
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            figures = check() or {}
        except pytest.fail.Exception as error:  # no Exception, and launch is to treat it as one
            raise AssertionError(str(error)) from None
        if where.type == "cuda":  # on a CPU no memory is measured from outside, and each collection takes 0.3 s
            gc.collect()
        align(where)
        device.synchronize(where)
        if where.type == "cuda":
            torch.cuda.empty_cache()
        report((name, figures))


def use_exact_arithmetic() -> None:
    """fp32 products in fp32: with TF32 they have 10 bits of mantissa, and nothing could be compared closely."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def sum_over_ranks() -> float:
    """What a world is tried with."""
    ones = torch.ones(1, device=rank_device())
    dist.all_reduce(ones)
    return float(ones)


def reason_to_skip(several: bool) -> str | None:
    """Why a test on a GPU, or on `several`, cannot run here."""
    if os.environ.get("MINIFSDP_DEVICE") == "cpu":
        return "MINIFSDP_DEVICE=cpu"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use"
    if several and torch.cuda.device_count() < 2:
        return "one GPU only"
    return None
