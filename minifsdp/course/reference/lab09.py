"""Reference answers of lab 09, precision, accumulation, offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.grad_scaler import ShardedGradScaler


@reference(
    "9.1",
    hints=(
        "What is sent, from where, and who waits? `copy_` casts on the way, so the cast shard needs no buffer: a part "
        "of `full` belongs to this rank of `group` anyway. Which one?",
        "Elements rank * S up to (rank + 1) * S of `full`, with S = `shard.numel()`. `copy_(shard, non_blocking=True)` "
        "into that slice, then `return comm.all_gather(full, slice, group)`: it may send a part of its own output.",
    ),
    forbids=(FlatUnit.gather_into, FlatParameter.mine),
)
def gather_low(full: Tensor, shard: Tensor, group: Group) -> Handle:
    """Start to fill `full` [P] with every rank's `shard` [P / N], in the dtype of `full`."""
    size = shard.numel()
    mine = full[group.rank() * size :][:size]
    mine.copy_(shard, non_blocking=True)
    return comm.all_gather(full, mine, group)


@reference(
    "9.2",
    hints=(
        "Two cases: there is no gradient yet, or there is one. The sum has to be made in the shard's dtype; in-place "
        "operations keep that of the tensor which they change.",
        "None: `device.empty(..., shard.dtype, ...)` becomes `shard.grad`, and `copy_` casts into it. Else "
        "`shard.grad.add_(mean)` casts and adds. In both cases `device.free(mean)` at the end.",
    ),
    forbids=(FlatUnit._deliver,),
)
def deliver(shard: nn.Parameter, mean: Tensor) -> None:
    """Add `mean` [P / N], of any dtype, to `shard.grad` in the shard's dtype, and free `mean`."""
    if shard.grad is None:
        shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
        shard.grad.copy_(mean)
    else:
        shard.grad.add_(mean)
    device.free(mean)


@reference(
    "9.3",
    hints=(
        "The two divisors multiply to N. Only fp16 has too small a range to leave all of the division for the end.",
        "For `torch.float16`: start with 1 and double while its square is below N; the rest is N divided by that. For "
        "any other dtype: 1 and N.",
    ),
)
def divisors(dtype: torch.dtype, ranks: int) -> tuple[int, float]:
    """The divisors of gradients before and after their sum over the ranks."""
    before = 1
    while dtype is torch.float16 and before * before < ranks:
        before *= 2
    return before, ranks / before


@reference(
    "9.4",
    hints=(
        "Each rank sees its own shards' gradients only. All have to do the same, so they have to know what the others "
        "have found, also those that have found nothing: a collective needs all of them.",
        "A tensor of one element, 1 if any gradient is not finite, else 0; `comm.all_reduce(found, group, "
        "comm.MAX).wait()` on every rank, in every step. If it is 1: return `scale / 2`. Else divide each gradient by "
        "`scale`, step, return `scale`.",
    ),
    forbids=(ShardedGradScaler._unscale_grads_,),
)
def step_together(optimizer: torch.optim.Optimizer, scale: float, group: Group) -> float:
    """Unscale and step, unless a gradient of any rank is not finite; returns the next scale."""
    params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    found = torch.zeros(1, device=params[0].device)
    for p in params:
        if p.grad is not None:
            p.grad.div_(scale)
            found += (~p.grad.isfinite()).any()
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    optimizer.step()
    return scale


@reference(
    "9.5",
    hints=(
        "Two decisions for each micro-batch: what its loss counts, and whether its backward runs inside "
        "`model.no_sync()`, where gradients stay where they are. The first backward outside reduces all that has piled "
        "up.",
        "In a loop: `nullcontext()` for the last micro-batch, and for all of them if `communicate`; else "
        "`model.no_sync()`. Inside it forward, division by the number of micro-batches, backward.",
    ),
)
def accumulate(model: Any, micro_batches: Sequence[tuple[Tensor, ...]], communicate: bool) -> None:
    """Add the mean gradient of the micro-batches to the shards' `.grad`."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        reduces = communicate or number == len(micro_batches)
        with nullcontext() if reduces else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@reference(
    "9.6",
    hints=(
        "`device.copy_to_host` only starts the copy. An event that is recorded behind it on the same stream tells when "
        "it is over; whoever reads the copy has to wait for that, and not before.",
        "Now: copy, `event = device.current_stream(mean.device).record_event()`, `device.free(mean)`. In the function "
        "that you return: `event.synchronize()`, then the copy becomes `shard.grad` or is added to it in place.",
    ),
    forbids=(FlatUnit._deliver, FlatUnit.finish_reduce),
)
def offload_gradient(shard: nn.Parameter, mean: Tensor) -> Callable[[], None]:
    """Start to move `mean` [P / N] to the host; returns the function that adds it to `shard.grad` there."""
    on_host = device.copy_to_host(mean)
    copied = device.current_stream(mean.device).record_event()
    device.free(mean)

    def arrive() -> None:
        copied.synchronize()
        if shard.grad is None:
            shard.grad = on_host
        else:
            shard.grad.add_(on_host)

    return arrive
