"""The open task of lab 14: a schedule for 4 ranks and 8 micro-batches, with a cap on the activations held.

    result = try_order(my_order)
    result.problem or f"{result.length:g} time units, {result.held} micro-batches held"

Backward is in two parts. A forward takes two time units, the gradients of inputs two, those of weights one: weights'
are the cheaper part, because attention has no weights. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from minifsdp.instruments.launch import launch, rank_device
from minifsdp.pipeline import PipelineStage, Schedule
from minifsdp.pipeline.actions import Action, Plan, check_complete
from minifsdp.pipeline.messages import check_order
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import Simulation, simulate

RANKS, MICROS, CAP = 4, 8, 6  # the cap: of how many micro-batches a rank may hold activations
UNITS = {"F": 2.0, "B": 3.0, "I": 2.0, "W": 1.0}
BOUND = (RANKS - 1) * UNITS["F"] + MICROS * (UNITS["F"] + UNITS["I"] + UNITS["W"])
"""The last rank's first input arrives after p - 1 forwards; then it has all of its work to do."""

Order = Callable[[int, int, int], Iterable[Action]]
"""The actions of a rank, given its number, the number of ranks, and that of micro-batches."""

OURS: dict[str, Order] = {"GPipe": gpipe, "1F1B": one_f_one_b, "ZB-H1": zero_bubble}


@dataclass(frozen=True)
class Result:
    """The result of a schedule.

    Attributes:
        simulation: of a step, in time units.
        problem: the reason why it does not count; None if it does.
    """

    simulation: Simulation
    problem: str | None

    @property
    def length(self) -> float:
        return self.simulation.length

    @property
    def held(self) -> int:
        """Micro-batches, on the rank that holds the most."""
        return max(self.simulation.held)


def plan_of(order: Order) -> list[list[Action]]:
    return [list(order(rank, RANKS, MICROS)) for rank in range(RANKS)]


def try_order(order: Order) -> Result:
    """Simulate a schedule.

    Raises:
        ValueError: an action is missing or there twice, or messages would not arrive in the order in which they are
            received.
        RuntimeError: it is a deadlock.
    """
    plan = plan_of(order)
    check_complete(plan, RANKS, MICROS)
    check_order(plan)
    simulation = simulate(plan, UNITS)
    held = max(simulation.held)
    return Result(simulation, f"holds {held} micro-batches of {CAP}" if held > CAP else None)


def ours() -> dict[str, Result]:
    """The results of minifsdp's schedules."""
    return {name: try_order(order) for name, order in OURS.items()}


def far_from_one_process(plan: Plan) -> float:
    """The largest difference of a gradient from that of one process, in float64, on real ranks."""
    return max(launch(_difference, len(plan), plan))


def _difference(plan: Plan) -> float:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), rank_device()
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(ranks))
    model = nn.Sequential(*layers).to(device, torch.float64)
    x, target = torch.randn(2, 2 * MICROS, 6, dtype=torch.float64).to(device)
    mine = list(model[rank].parameters())
    expected = torch.autograd.grad(mse_loss(model(x), target), mine)
    schedule = Schedule(plan, PipelineStage(model[rank], rank, ranks, device), MICROS, mse_loss)
    schedule.step(*([x] if rank == 0 else []), target=target if rank == ranks - 1 else None)
    return max(
        float("inf") if p.grad is None else float((p.grad - q).abs().max()) for p, q in zip(mine, expected, strict=True)
    )
