"""A pipeline's plan by the clock: real ranks and real messages, with stages that sleep instead of computing.

    rows = run_asleep(plan, {"F": 0.02, "B": 0.04})
    bubble_of(rows)

A rank that sleeps needs no processor, so the ranks keep their times even where there are fewer cores than ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.instruments.launch import launch, rank_device
from minifsdp.pipeline import PipelineStage, Schedule
from minifsdp.pipeline.actions import Plan, stages_of
from minifsdp.pipeline.simulate import Timed, length_of

STEPS = 2  # after one that connects the ranks, in which no stage sleeps; the shortest counts


def run_asleep(plan: Plan, seconds: Mapping[str, float], steps: int = STEPS) -> list[list[Timed]]:
    """Run a plan on as many ranks as it has.

    Args:
        plan: complete, and without a deadlock.
        seconds: by kind of action, how long a stage sleeps.
        steps: of these, the shortest is returned: the one least disturbed by other programs.
    """
    found = launch(_steps_asleep, len(plan), plan, dict(seconds), steps)
    return min(([rank[step] for rank in found] for step in range(1, steps + 1)), key=length_of)


def _steps_asleep(plan: Plan, seconds: Mapping[str, float], steps: int) -> list[list[Timed]]:
    """The actions of this rank in each step, timed by a clock that all processes of a machine share."""
    done: list[Timed] = []
    naps = dict.fromkeys(seconds, 0.0)

    def nap() -> None:
        action, start = schedule.executor.at, time.monotonic()
        time.sleep(naps[action.kind])
        done.append(Timed(action, start, time.monotonic()))

    count = 1 + max(action.stage for actions in plan for action in actions)
    micros = 1 + max(action.micro for actions in plan for action in actions)
    mine = stages_of(plan[dist.get_rank()])

    def weights_later() -> Callable[..., None]:
        return lambda: nap() if schedule.executor.at.kind == "W" else None

    device = rank_device()
    stages = [PipelineStage(_Asleep(nap), stage, count, device, dw_builder=weights_later) for stage in mine]
    schedule = Schedule(plan, stages, micros, lambda output, target: (output - target).sum())
    found = []
    for _ in range(steps + 1):
        done.clear()
        dist.barrier()
        x = torch.zeros(micros, 1, device=device)
        schedule.step(*([x] if 0 in mine else []), target=x if count - 1 in mine else None)
        found.append(list(done))
        naps.update(seconds)
    return found


class _Asleep(nn.Module):
    """Passes on what it gets, after a while."""

    def __init__(self, nap: Callable[[], None]) -> None:
        super().__init__()
        self.nap, self.weight = nap, nn.Parameter(torch.ones((), device=rank_device()))

    def forward(self, x: Tensor) -> Tensor:
        self.nap()
        y: Tensor = _NapInBackward.apply(x * self.weight, self.nap)  # type: ignore[no-untyped-call]
        return y


class _NapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Callable[[], None]) -> Tensor:
        ctx.nap = nap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.nap()
        return gradient, None
