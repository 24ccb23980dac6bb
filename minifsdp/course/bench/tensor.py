"""Tensor parallelism against torch's DTensor styles: host time with collectives that return at once, and steps on gloo.

Both apply the same plan to the same blocks. The host's time is that of overhead.py: CPU time of the process beyond the
plain module's, on rank 0 of a `fake` process group, per block and step. A step on gloo is the wall time of forward,
backward, and gradients set to None, between two barriers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import minifsdp.tensor_parallel as ours
from minifsdp.course.bench.contest import Contest, Cost, Step, costs
from minifsdp.instruments.launch import launch
from minifsdp.mesh import Mesh

CONTESTANTS = ("torch-tp", "our-tp", "torch-tp-sp", "our-tp-sp")


class TensorSettings(NamedTuple):
    """One run.

    Attributes:
        width: of the blocks, with 4 heads and an MLP of 4 times the width.
        tokens: of the one sequence.
        blocks: how many.
        ranks: the tensor-parallel ones.
        steps: of each contestant that are timed.
    """

    width: int
    tokens: int
    blocks: int = 6
    ranks: int = 2
    steps: int = 40


class Block(nn.Module):
    """A transformer block of plain Linear layers, [1, tokens, width] to the same shape."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return mixed


def parallelize(model: nn.Module, name: str, mesh: DeviceMesh) -> nn.Module:
    """Apply a contestant's styles, of `CONTESTANTS`, to every `Block` of the model."""
    library: Any = ours if name.startswith("our") else theirs
    shards: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    if name.endswith("sp"):
        shards = {"columns": {"input_layouts": Shard(1)}, "rows": {"output_layouts": Shard(1)}}
        plan = {norm: library.SequenceParallel() for norm in ("norm1", "norm2")}
    plan |= {each: library.ColwiseParallel(**shards.get("columns", {})) for each in ("q", "k", "v", "up")}
    plan |= {each: library.RowwiseParallel(**shards.get("rows", {})) for each in ("out", "down")}
    for block in model.children():
        library.parallelize_module(block, mesh, plan)
    return model


class Found(NamedTuple):
    """The figures of one run on rank 0: costs per block and step, and losses of the first step."""

    costs: dict[str, Cost]
    losses: dict[str, float]


def host(settings: TensorSettings) -> Found:
    """Measure the host's CPU time in a world that is pretended."""
    return launch(_contest, settings.ranks, settings, "cpu", backend="fake", timeout=600)[0]


def steps(settings: TensorSettings) -> Found:
    """Measure steps on real ranks."""
    return launch(_contest, settings.ranks, settings, "wall", timeout=600)[0]


def _contest(settings: TensorSettings, clock: Literal["cpu", "wall"]) -> Found:
    names = CONTESTANTS if clock == "wall" else ("plain", *CONTESTANTS)
    times = Contest({name: _step(settings, name, clock == "wall") for name in names}, clock, settings.steps).run()
    return Found(costs(times, settings.blocks), {name: each.losses[0] for name, each in times.items()})


def _step(settings: TensorSettings, name: str, wait: bool) -> Step:
    """A step, until all ranks have taken theirs if they `wait`; with sequence parallelism a rank's own loss."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(settings.width) for _ in range(settings.blocks)))
    tokens = settings.tokens
    if name != "plain":
        model = parallelize(model, name, Mesh(tp=dist.get_world_size()).device_meshes("cpu", ["tp"])["tp"])
        tokens //= settings.ranks if name.endswith("sp") else 1
    params, rows = list(model.parameters()), torch.ones(1, tokens, settings.width)

    def step(_: int) -> Tensor:
        loss: Tensor = model(rows).square().mean()
        loss.backward()
        for p in params:
            p.grad = None
        if wait:
            dist.barrier()
        return loss.detach()

    return step
