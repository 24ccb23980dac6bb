"""Training on two ranks is training in one process on the same GPU; values that ranks compute, against what is exact.

Tolerances. In fp32 a sum of n products in another order is off by about 1e-7 times the root of n, n up to some hundred
here; a mean of two halves is another order, and other shapes are other kernels. So gradients agree to about 1e-6 of the
largest, and losses over five steps of descent to 1e-5. Parameters are compared as a part of what has changed in them:
that change is small beside the values, in whose last bit it is lost, so 1e-3; a gradient that is a sum where a mean
should be is off by 1. With AdamW parameters are not compared: an element whose gradient is nothing but rounding (the
bias of the attention's keys) moves as far as any.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_gpu import ON_GPU, Figures, GpuChecks, Way
from small_model import RATE, Course, assert_same, batches, make_model, my_share, sgd, step, train, whole_state
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp
from torch.distributed.fsdp import MixedPrecision as TorchsPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy

from minifsdp import build
from minifsdp.batch import Batch
from minifsdp.course.ladder.rungs import RUNGS, Trainer, plain
from minifsdp.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.gpt import Block
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.launch import rank_device

pytestmark = ON_GPU
check = GpuChecks(__name__)

LOSSES, PARAMETERS = 1e-5, 1e-3
CLIP = 0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "forward prefetch, no limit": {"forward_prefetch": True, "limit_all_gathers": False},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(True)},
    "original parameters": {"use_orig_params": True},
}


def sharded(**options: Any) -> Trainer:
    return sgd(Fsdp(make_model(), auto_wrap_policy={Block}, **options))


def one_process(take: Callable[[Trainer, Batch], Tensor] = step) -> Course:
    return train(sgd(make_model()), take, alone=True)


@check(rung=list(RUNGS))
def every_rung_trains_as_one_process_with_sgd(rung: str) -> Figures:
    with patch.object(build, "AdamW", torch.optim.SGD), patch.object(build.build, "__defaults__", (RATE,)):
        course = train(RUNGS[rung].build(make_model(), 2))
    found = assert_same(course, one_process(), LOSSES, PARAMETERS)
    return {f"numerics.{rung}.{name}": value for name, value in found.items()}


@check(rung=list(RUNGS))
def every_rung_trains_as_one_process_with_adamw(rung: str) -> None:
    expected = train(plain(make_model()), alone=True)
    course = train(RUNGS[rung].build(make_model(), 2))
    torch.testing.assert_close(course.losses, expected.losses, rtol=1e-4, atol=0)
    assert course.losses[-1] < course.losses[0]


@check(options=OPTIONS)
def fsdp_trains_as_one_process(options: dict[str, Any]) -> None:
    trainer = sharded(**options)
    assert_same(train(trainer), one_process(), LOSSES, PARAMETERS)
    offloads = "cpu_offload" in options
    assert all(p.device.type == ("cpu" if offloads else rank_device().type) for p in trainer.model.parameters())


@check()
def bf16_is_torchs() -> Figures:
    """The same kernels on the same shapes; only where a parameter lies in memory may choose another one.

    One rounding of bf16 is 2^-8 of a value; a loss is a mean of many.
    """
    bf16 = torch.bfloat16, torch.bfloat16  # of parameters, of reductions
    ours = train(sharded(mixed_precision=MixedPrecision(*bf16)))
    wrapped = TorchsFsdp(
        make_model(),
        auto_wrap_policy=TorchsPolicy({Block}),
        mixed_precision=TorchsPrecision(*bf16),
        device_id=rank_device(),
    )
    trainer = sgd(wrapped)
    losses = torch.stack([step(trainer, my_share(batch)) for batch in batches()])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    torch.testing.assert_close(ours.losses, losses.cpu(), rtol=2**-8, atol=0)
    assert not torch.equal(ours.losses, one_process().losses)  # it is not fp32 that agrees with itself
    return {"numerics.bf16.from_torchs": float((ours.losses - losses.cpu()).abs().max())}


@check(options=OPTIONS)
def the_norm_that_gradients_are_clipped_by_is_of_all_of_them(options: dict[str, Any]) -> None:
    norms: list[Tensor] = []

    def clipped(trainer: Trainer, batch: Batch) -> Tensor:
        model: Any = trainer.model
        loss: Tensor = model(*batch)
        loss.backward()
        clip = model.clip_grad_norm_ if isinstance(model, Fsdp) else partial(clip_alone, model)
        norms.append(clip(CLIP).cpu())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss.detach()

    expected = one_process(clipped)
    expected_norms, norms = norms, []
    assert_same(train(sharded(**options), clipped), expected, LOSSES, PARAMETERS)
    torch.testing.assert_close(norms, expected_norms, rtol=LOSSES, atol=0)
    assert min(norms) > CLIP


def clip_alone(model: nn.Module, norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(list(model.parameters()), norm)


@check(options=OPTIONS, pattern=("inside", "outside", "mixed"))
def accumulated_gradients_are_those_of_the_whole_batch(options: dict[str, Any], pattern: str) -> None:
    """Three micro-batches; n: inside `no_sync`."""
    inside = {"inside": "nns", "outside": "sss", "mixed": "sns"}[pattern]

    def accumulated(trainer: Trainer, batch: Batch) -> Tensor:
        model: Any = trainer.model
        losses = []
        parts = zip(*(part.chunk(3) for part in batch), strict=True)
        for how, part in zip(inside, parts, strict=True):
            with model.no_sync() if how == "n" and isinstance(model, Fsdp) else nullcontext():
                losses.append(model(*part) / 3)
                losses[-1].backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return torch.stack(losses).sum().detach()

    assert_same(train(sharded(**options), accumulated), one_process(), LOSSES, PARAMETERS)


@check(options=OPTIONS)
def an_overflow_of_one_rank_skips_everybodys_step(options: dict[str, Any]) -> None:
    trainer = sharded(**options)
    scaler = ShardedGradScaler(rank_device().type, init_scale=1024.0)
    before = whole_state(trainer.model)

    def scaled(trainer: Trainer, batch: Batch, overflows: bool = False) -> Tensor:
        loss: Tensor = trainer.model(*batch)
        scaler.scale(loss * torch.inf if overflows and dist.get_rank() == 1 else loss).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()
        return loss.detach()

    scaled(trainer, my_share(batches()[0]), overflows=True)
    assert scaler.get_scale() == 512
    for name, value in whole_state(trainer.model).items():
        assert torch.equal(value, before[name]), name
    assert_same(train(trainer, scaled), one_process(), LOSSES, PARAMETERS)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str, world_of_values: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, world_of_values, record_property)
