"""Reference answers of lab 03, ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from minifsdp import comm, device
from minifsdp.course.workshop.references import reference
from minifsdp.layout import Layout
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer
from minifsdp.zero.bucket import Bucket
from minifsdp.zero.partition import ShardedOptimizer
from minifsdp.zero.stage1 import reduce_gradients
from minifsdp.zero.stage2 import BucketGradients


@reference(
    "3.1",
    hints=(
        "`-numel % ranks` elements are missing to the next multiple of `ranks`; they go behind the last parameter, as "
        "zeros. Views of a flat tensor come from `split` and `chunk`, never from `torch.cat`, which copies.",
        "Make `flat` of zeros, take `flat[:numel].split(sizes)`, and for each parameter: copy its values into its "
        "piece, then let `p.data` be that piece in the parameter's shape. The shards are `flat.chunk(ranks)`.",
    ),
    forbids=(Bucket.__init__, Layout.__init__),
)
def partition(params: list[nn.Parameter], ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Move the parameters into one flat buffer, and cut that into one equal shard per rank."""
    sizes = [p.numel() for p in params]
    numel = sum(sizes)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
    for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
        piece.copy_(p.detach().flatten())
        p.data = piece.view(p.shape)
    return flat, list(flat.chunk(ranks))


@reference(
    "3.2",
    hints=(
        "An optimizer updates what it was given, and makes state for nothing else. Which tensors are this rank's?",
        "`nn.Parameter(t)` shares the memory of `t`. Make one of shard number `rank` of every bucket, and give the "
        "list to `optimizer_class` together with `**defaults`.",
    ),
    forbids=(ShardedOptimizer.__init__,),
)
def shard_optimizer(
    buckets: list[list[Tensor]], rank: int, optimizer_class: type[Optimizer], **defaults: Any
) -> Optimizer:
    """An optimizer over this rank's shard of every bucket."""
    return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)


@reference(
    "3.3",
    hints=(
        "Three buffers: the `.grad`s, a bucket [padded] laid out as `partition` laid out the parameters, and the mean "
        "[padded / N]. `device.empty` is uninitialized. What must still be there until the collective has ended?",
        "Zero the bucket, copy each `.grad` that is not None into its piece of it, start "
        "`comm.reduce_scatter(mean, bucket, group, comm.MEAN)`. The inner function `finish` waits, frees the bucket "
        "with `device.free`, and sets `shard.grad` to `mean`, or adds `mean` to it and frees `mean`.",
    ),
    forbids=(reduce_gradients, Bucket.start_reduction),
)
def reduce_bucket(params: list[nn.Parameter], shard: nn.Parameter, group: comm.Group) -> Callable[[], None]:
    """Start to reduce-scatter the gradients of a bucket; return the function that finishes it."""
    bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
    start = 0
    for p in params:
        if p.grad is not None:
            bucket[start : start + p.numel()] = p.grad.flatten()
        start += p.numel()
    mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
    reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)

    def finish() -> None:
        reduction.wait()
        device.free(bucket)
        if shard.grad is None:
            shard.grad = mean
        else:
            shard.grad += mean
            device.free(mean)

    return finish


@reference(
    "3.4",
    hints=(
        "Three things in this order: update, give the gradients up, gather. `optimizer.param_groups[0]['params']` are "
        "this rank's shards, one per entry of `flats`, and each shard is this rank's part of its flat buffer.",
        "`optimizer.step()`; for each shard `device.free(shard.grad)` and `shard.grad = None`; for each bucket "
        "`comm.all_gather(flat, shard.data, group)`, and wait for every one of them.",
    ),
    forbids=(Bucket.start_gather, ShardedOptimizer.gather_parameters, Zero1Optimizer.step, Zero2Optimizer.step),
)
def update_and_gather(optimizer: Optimizer, flats: list[Tensor], group: comm.Group) -> None:
    """Update this rank's shards, free their gradients, and gather the updated parameters from all ranks."""
    shards = optimizer.param_groups[0]["params"]
    optimizer.step()
    for shard in shards:
        device.free(shard.grad)
        shard.grad = None
    for flat, shard in zip(flats, shards, strict=True):
        comm.all_gather(flat, shard.data, group).wait()


@reference(
    "3.5",
    hints=(
        "`p.register_post_accumulate_grad_hook(f)` calls `f(p)` once `p.grad` is complete. The order in which the "
        "gradients of a bucket come is autograd's. How do you know that the one that came was the last, and what must "
        "be as before when the next backward begins?",
        "Keep the set of parameters still missing. When it runs empty: fill it again, finish what is in `in_flight`, "
        "append `start(params, shard, group)` to it, and only then set every `.grad` of the bucket to None.",
    ),
    forbids=(Zero2Optimizer.__init__, BucketGradients.start_reduction),
)
def reduce_in_backward(
    params: list[nn.Parameter],
    shard: nn.Parameter,
    start: Callable[[list[nn.Parameter], nn.Parameter, comm.Group], Callable[[], None]],
    in_flight: list[Callable[[], None]],
    group: comm.Group,
) -> list[RemovableHandle]:
    """Hooks that reduce a bucket during backward, as soon as it is full, and free its gradients."""
    missing: set[Tensor] = set(params)

    def on_gradient(p: Tensor) -> None:
        missing.remove(p)
        if missing:
            return
        missing.update(params)
        while in_flight:
            in_flight.pop()()
        in_flight.append(start(params, shard, group))
        for q in params:
            q.grad = None

    return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
