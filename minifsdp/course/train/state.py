"""The mutable state of a training run, and its initial value."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from minifsdp import comm, fsdp2
from minifsdp.build import build
from minifsdp.course.train.settings import FLAT, PRECISIONS, PREFETCHES, TrainSettings
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from minifsdp.gpt import GPT, Block
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.losses import token_mean
from minifsdp.trainer import Trainer


@dataclass
class State:
    """The state that a checkpoint must hold, besides the ranks' RNGs, for training to resume as if never interrupted.

    Attributes:
        trainer: the model and its optimizer.
        scaler: the loss scaler; only fp16 needs it, otherwise it does nothing.
        draws: the generator that draws the batches, the same on every rank; it marks the position in the data.
        step: steps done.
        losses: [steps], float32 on the device; NaN for future steps.
    """

    trainer: Trainer
    scaler: torch.amp.GradScaler
    draws: torch.Generator
    step: int
    losses: Tensor


def begin(settings: TrainSettings, where: torch.device) -> State:
    """The state before the first step."""
    model = settings.model()
    trainer = wrapped(model, settings, where) if settings.recipe is None else divided(model, settings, where)
    seed_rank(settings.seed, 0)
    return State(
        trainer,
        ShardedGradScaler(where.type, enabled=settings.precision == "fp16"),
        torch.Generator().manual_seed(settings.seed),
        0,
        torch.full([settings.steps], torch.nan, device=where),
    )


def divided(model: GPT, settings: TrainSettings, where: torch.device) -> Trainer:
    """The model divided by `settings.recipe`."""
    assert settings.recipe is not None
    return build(model.to(where), settings.recipe, settings.lr)


def wrapped(model: GPT, settings: TrainSettings, where: torch.device) -> Trainer:
    """The model in a wrapper of `settings.strategy`, as in a script of one's own."""
    wrapper = wrap(model, settings, where)
    optimizer = AdamW(wrapper.parameters(), settings.lr)
    return Trainer(wrapper, optimizer, loss_of=partial(token_mean, group=comm.world()))


def wrap(model: GPT, settings: TrainSettings, where: torch.device) -> Any:
    """Wrap the model by `settings.strategy`, with a unit per block; gradients are reduced in fp32."""
    dtype = PRECISIONS[settings.precision]
    if settings.strategy == "ddp":
        return DistributedDataParallel(model.to(where), gradient_as_bucket_view=True)
    if settings.strategy == "fsdp2":
        policy = fsdp2.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
        home = fsdp2.CPUOffloadPolicy() if settings.offload else fsdp2.OffloadPolicy()
        mesh = settings.mesh.device_meshes(where.type, ["dp"])["dp"]
        for module in (*model.blocks, model):
            fsdp2.fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=home)
        return model
    strategy = FLAT[settings.strategy]
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(settings.offload),
        auto_wrap_policy={Block},
        backward_prefetch=PREFETCHES[settings.backward_prefetch],
        mixed_precision=None if dtype is None else MixedPrecision(dtype, reduce_dtype=torch.float32),
        device_id=where,  # moved unit by unit, so that the whole model is never on it
        forward_prefetch=settings.forward_prefetch,
        limit_all_gathers=settings.limit,
        device_mesh=settings.mesh.device_meshes(where.type, ["dp", *["replicate"] * strategy.is_hybrid])["dp"],
    )


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """Backwards inside the `with` leave gradients unsharded, for a later one to reduce."""
    if not isinstance(model, fsdp2.FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def seed_rank(seed: int, step: int) -> None:
    """Seed this rank differently from the others, for dropout; `settings.model()` leaves all with the same seed."""
    own = hash((seed, step, dist.get_rank()))
    torch.manual_seed(own)
    random.seed(own)
