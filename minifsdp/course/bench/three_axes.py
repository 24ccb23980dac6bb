"""A step over three axes, ours against torch's: 1F1B over stages, FSDP2 in each, tensor parallelism in each unit.

Both run the same lines on eight ranks over gloo, each with its own `fully_shard`, styles and pipeline. A step is the
wall time of the schedule, AdamW and the next gradients, between two barriers. Sequence parallelism cuts activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torchs_fsdp
from torch.distributed import pipelining as torchs_pipeline
from torch.nn.functional import mse_loss

from minifsdp import fsdp2 as our_fsdp
from minifsdp import pipeline as our_pipeline
from minifsdp.course.bench.contest import Contest, Cost, Step, costs
from minifsdp.course.bench.tensor import Block, parallelize
from minifsdp.instruments.launch import launch
from minifsdp.mesh import Mesh

LIBRARIES: Mapping[str, tuple[Any, Any]] = {
    "torch": (torchs_fsdp, torchs_pipeline),
    "our": (our_fsdp, our_pipeline),
}
MESH = Mesh(pp=2, dp=2, tp=2)


class ThreeAxesSettings(NamedTuple):
    """One run.

    Attributes:
        width: of the blocks, with 4 heads and an MLP of 4 times the width.
        tokens: of a sequence.
        blocks: of each stage.
        micros: micro-batches, of one sequence each, of each replica.
        steps: of each library that are timed.
    """

    width: int = 128
    tokens: int = 64
    blocks: int = 2
    micros: int = 4
    steps: int = 12


class Found(NamedTuple):
    """The figures of one run: the slowest rank's costs per step, and the last stage's loss of the first step."""

    costs: dict[str, Cost]
    losses: dict[str, float]


def measure(settings: ThreeAxesSettings) -> Found:
    """Run once in new processes."""
    of_ranks = launch(_contest, MESH.ranks, settings, timeout=600)
    slowest = {name: max(rank.costs[name] for rank in of_ranks) for name in LIBRARIES}
    return Found(slowest, of_ranks[-1].losses)


def _contest(settings: ThreeAxesSettings) -> Found:
    times = Contest({name: _step(settings, name) for name in LIBRARIES}, "wall", settings.steps).run()
    return Found(costs(times), {name: each.losses[0] for name, each in times.items()})


def _step(settings: ThreeAxesSettings, name: str) -> Step:
    """A step until all ranks have taken theirs; it returns the loss of this rank's tokens, 0 on the first stage."""
    fsdp, pipeline = LIBRARIES[name]
    meshes = MESH.device_meshes("cpu")
    place = meshes["pp"].get_local_rank()
    torch.manual_seed(place)
    stage: nn.Module = nn.Sequential(*(Block(settings.width) for _ in range(settings.blocks)))
    parallelize(stage, f"{name}-tp-sp", meshes["tp"])
    for module in (*stage.children(), stage):
        fsdp.fully_shard(module, mesh=meshes["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(stage.parameters())
    part = pipeline.PipelineStage(stage, place, MESH.pp, torch.device("cpu"), group=meshes["pp"].get_group())
    schedule = pipeline.Schedule1F1B(part, settings.micros, mse_loss)
    torch.manual_seed(2)
    rows = torch.randn(settings.micros, settings.tokens // MESH.tp, settings.width)
    given, target = ([], rows) if place else ([rows], None)

    def step(_: int) -> float:
        losses: list[Any] = []
        schedule.step(*given, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step
