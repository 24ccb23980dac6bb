"""Loss scaling on two ranks, of which one sees an infinity."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from draw.practice.drawing import bare, box
from matplotlib.figure import Figure
from minifsdp.answers.lab09 import step_together
from torch import nn
from torch.optim import SGD, Optimizer

from minifsdp import comm
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.instruments.launch import launch
from minifsdp.instruments.plots.palette import OUTCOME_COLOURS, PALE, SOFT

RIGHT, WRONG = OUTCOME_COLOURS.values()
BAD = 2  # the step in which one rank's gradient is infinite


@cache
def verdicts() -> dict[str, list[list[tuple[float, float]]]]:
    """By who decides and by rank, what `scaled` returns."""
    ways = {"each rank decides alone": alone, "found_inf is all-reduced": step_together}
    ranks = launch(lambda: [scaled(decide) for decide in ways.values()], 2, backend="gloo")
    return {name: [rank[place] for rank in ranks] for place, name in enumerate(ways)}


class Sum(nn.Module):
    """Every element's gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def alone(optimizer: Optimizer, scale: float, group: comm.Group) -> float:
    """What a scaler does that looks at its own rank only."""
    (shard,) = optimizer.param_groups[0]["params"]
    shard.grad /= scale
    if not shard.grad.isfinite().all():
        return scale / 2
    optimizer.step()
    return scale


def scaled(decide: Callable[[Optimizer, float, comm.Group], float]) -> list[tuple[float, float]]:
    """By step: the scale, and how far this rank's half of the model has moved."""
    model = FullyShardedDataParallel(Sum())
    (shard,) = model.parameters()
    optimizer, scale, found = SGD([shard], 1.0), 1024.0, []
    for number in range(5):
        (scale * model()).backward()
        if number == BAD and dist.get_rank() == 1:
            shard.grad.fill_(torch.inf)
        before, used = shard.detach().clone(), scale
        scale = decide(optimizer, scale, comm.world())
        found.append((used, (before - shard.detach()).item()))
        optimizer.zero_grad()
    return found


def draw_scaler() -> Figure:
    """Steps of two ranks, one of which sees an infinity: each decides alone, or all decide together."""
    figure, axes = bare(4.8, 12.0, 4.7, left=-1.35, bottom=-0.35)
    for panel, (title, ranks) in enumerate(verdicts().items()):
        left = 6.3 * panel
        axes.text(left, 4.7, title, va="top", fontweight="bold")
        for rank, found in enumerate(ranks):
            bottom = 2.1 - 2.0 * rank
            if not panel:
                axes.text(-0.15, bottom + 0.65, f"rank {rank}", ha="right", va="center")
                axes.text(-0.15, bottom + 1.38, "scale", ha="right", color=SOFT)
            for step, (scale, moved) in enumerate(found):
                colour = {0: PALE, 1: RIGHT}.get(moved, WRONG)
                style: dict[str, Any] = {"fontsize": 20, "color": "white" if moved else SOFT}
                seen = step == BAD and rank == 1
                skips = "inf:\nskip" if seen else "skip"
                style |= {"color": WRONG} if seen else {}
                box(axes, left + 1.12 * step, bottom, (1.08, 1.3), colour, f"{moved:g}" if moved else skips, **style)
                axes.text(left + 1.12 * step + 0.54, bottom + 1.38, f"{scale:.0f}", ha="center", color=SOFT)
        if not panel:
            axes.text(-0.15, 0.0, "step", va="top", ha="right", color=SOFT)
        for step in range(5):
            axes.text(left + 1.12 * step + 0.54, 0.0, str(step + 1), va="top", ha="center", color=SOFT)
    return figure
