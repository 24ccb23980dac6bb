"""Tensor parallelism against torch's DTensor styles: host time with collectives that return at once, and steps on gloo.

Both apply the same plan to the same blocks. The host's time is that of overhead.py: CPU time of the process beyond the
plain module's, on rank 0 of a `fake` process group, per block and step. A step on gloo is the wall time of forward,
backward, and gradients set to None, between two barriers.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import minifsdp.tensor_parallel as ours
from minifsdp import comm
from minifsdp.course.bench.turns import turns_without_garbage
from minifsdp.course.launch import launch

WARM_UP = 5  # steps
CONTESTANTS = ("torch-tp", "our-tp", "torch-tp-sp", "our-tp-sp")


class Settings(NamedTuple):
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


class _Stepper:
    def __init__(self, name: str, settings: Settings) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Block(settings.width) for _ in range(settings.blocks)))
        tokens = settings.tokens
        if name != "plain":
            assert dist.group.WORLD is not None
            model = parallelize(model, name, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
            tokens //= settings.ranks if name.endswith("sp") else 1
        self.model, self.params = model, list(model.parameters())
        self.rows = torch.ones(1, tokens, settings.width)

    def step(self) -> Tensor:
        """Returns the loss: with sequence parallelism of this rank's tokens."""
        loss: Tensor = self.model(self.rows).square().mean()
        loss.backward()
        for p in self.params:
            p.grad = None
        return loss.detach()


class Found(NamedTuple):
    """The figures of one run.

    Attributes:
        seconds: of each timed step, by contestant; of the host's also of "plain".
        messages: collectives of ours in a step; 0 for torch's contestants, where they are not counted.
        losses: of the first step.
    """

    seconds: dict[str, list[float]]
    messages: dict[str, int]
    losses: dict[str, float]


def host(settings: Settings) -> Found:
    """Measure the host's CPU time in a world that is pretended."""
    return launch(_take_turns, settings.ranks, settings, False, backend="fake", timeout=600)[0]


def steps(settings: Settings) -> Found:
    """Measure steps on real ranks."""
    return launch(_take_turns, settings.ranks, settings, True, timeout=600)[0]


def _take_turns(settings: Settings, on_ranks: bool) -> Found:
    torch.set_num_threads(1)
    names = CONTESTANTS if on_ranks else ("plain", *CONTESTANTS)
    steppers = {name: _Stepper(name, settings) for name in names}
    found = Found({name: [] for name in names}, dict.fromkeys(names, 0), {})
    clock = time.perf_counter if on_ranks else time.process_time
    with comm.record() as log:
        for number, name, stepper in turns_without_garbage(steppers, WARM_UP + settings.steps):
            log.clear()
            if on_ranks:
                dist.barrier()
            start = clock()
            loss = stepper.step()
            if on_ranks:
                dist.barrier()
            taken = clock() - start
            found.messages[name] = len(log)
            found.losses.setdefault(name, loss.item())
            if number >= WARM_UP:
                found.seconds[name].append(taken)
    return found
