"""The state of a training run, and its beginning."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

from minifsdp.course.ladder.model import GPT, Block
from minifsdp.course.train.settings import PRECISIONS, PREFETCHES, STRATEGIES, Settings
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from minifsdp.grad_scaler import ShardedGradScaler


@dataclass
class State:
    """All that a checkpoint has to hold for training to go on as if it had never stopped; and the RNGs of the ranks.

    Attributes:
        model: a DistributedDataParallel or a FullyShardedDataParallel.
        optimizer: its optimizer.
        scaler: of the loss; only fp16 needs it, for the others it does nothing.
        draws: draws the batches, the same on every rank: where in the data training is.
        step: steps done.
        losses: [steps], float32 on the device; those to come are NaN.
    """

    model: Any
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    draws: torch.Generator
    step: int
    losses: Tensor


def begin(settings: Settings, where: torch.device) -> State:
    """A model that has learnt nothing."""
    model = wrap(settings.model(), settings, where)
    seed_rank(settings.seed, 0)
    return State(
        model,
        AdamW(model.parameters(), settings.lr),
        ShardedGradScaler(where.type, enabled=settings.precision == "fp16"),
        torch.Generator().manual_seed(settings.seed),
        0,
        torch.full([settings.steps], torch.nan, device=where),
    )


def wrap(model: GPT, settings: Settings, where: torch.device) -> DistributedDataParallel | FullyShardedDataParallel:
    """The model as `settings.strategy` has it, a unit per block; gradients are reduced in fp32."""
    strategy = STRATEGIES[settings.strategy]
    if strategy is None:
        return DistributedDataParallel(model.to(where), gradient_as_bucket_view=True)
    dtype = PRECISIONS[settings.precision]
    shape = (settings.replicas, settings.ranks // settings.replicas) if strategy.is_hybrid else (settings.ranks,)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(settings.offload),
        auto_wrap_policy={Block},
        backward_prefetch=PREFETCHES[settings.backward_prefetch],
        mixed_precision=None if dtype is None else MixedPrecision(dtype, reduce_dtype=torch.float32),
        device_id=where,  # unit by unit: the whole model is never there
        forward_prefetch=settings.forward_prefetch,
        limit_all_gathers=settings.limit,
        device_mesh=init_device_mesh(where.type, shape),
    )


def seed_rank(seed: int, step: int) -> None:
    """Random numbers of this rank's own, as dropout needs them: `settings.model()` has left all ranks with the same."""
    own = hash((seed, step, dist.get_rank()))
    torch.manual_seed(own)
    random.seed(own)
