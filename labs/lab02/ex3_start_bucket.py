"""Exercise 2.3: Start a bucket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.ddp import bucketed

from .shared import (
    SECONDS,
    THROUGH_COMM,
    bucket_of_rank,
    draw,
    group_of_one,
    make_bucket,
    parameter,
    phases,
    told,
    travelling,
)


@reference(
    "2.3",
    hints=(
        "`flat.split([...])` cuts the buffer into parts that are views of it: what is copied into a part is in `flat`. "
        "A gradient that is None still has its place in the buffer, or the ranks' buffers would not match.",
        "Allocate with `device.empty(numel, dtype, 'communication', where)`. For each part and parameter: "
        "`part.zero_()` if there is no gradient, else `part.copy_(param.grad.flatten())`. Then return `flat` and what "
        "`comm.all_reduce(flat, group, comm.MEAN)` returns, without `wait()`.",
    ),
    forbids=(bucketed.BucketedDDP.sync_gradients, bucketed.start_bucket),
)
def start_bucket(bucket: list[nn.Parameter], group: comm.Group) -> tuple[Tensor, comm.Handle]:
    """Copy the gradients of the bucket into one flat buffer and start its all-reduce.

    Args:
        bucket: parameters of one dtype on one device. A gradient that is None counts as zero.
        group: the ranks to average over.

    Returns:
        The buffer `flat` [sum of numel], with role "communication", which holds the gradients in the
        bucket's order, and the handle of the one all-reduce that replaces its contents by their
        mean over the ranks. Do not wait for anything, and leave the gradients themselves unchanged.
    """
    sizes = [param.numel() for param in bucket]
    flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
    for part, param in zip(flat.split(sizes), bucket, strict=True):
        if param.grad is None:
            part.zero_()
        else:
            part.copy_(param.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@contextmanager
def poisoned_buffers() -> Iterator[list[tuple[int, str]]]:
    """Bytes and role of each buffer that `device.empty` hands out inside the `with`, full of NaN."""
    seen: list[tuple[int, str]] = []

    def note(buffer: Tensor, role: str) -> None:
        buffer.fill_(torch.nan)
        seen.append((buffer.nbytes, role))

    device.buffer_observers.append(note)
    try:
        yield seen
    finally:
        device.buffer_observers.remove(note)


def flattened(seed: int, rank: int, size: int) -> Tensor:
    grads = bucket_of_rank(seed, rank, size)
    return torch.cat([torch.zeros(2 * size) if grad is None else grad.flatten() for grad in grads])


def observe_start(answer: Any, size: int, seed: int) -> dict[str, Any]:
    rank = dist.get_rank()
    bucket = make_bucket(seed, rank, size)
    with comm.record() as calls, phases() as seen, poisoned_buffers() as buffers, travelling() as sent:
        flat, handle = buffer_and_handle(answer(bucket, comm.world()))
        at_return, unwritten = list(seen), int(flat.isnan().sum())
        handle.wait()
    other_flat, other_handle = buffer_and_handle(answer(bucket, comm.world()))
    other_handle.wait()
    half = [parameter(draw(seed + 9, rank, size).bfloat16(), draw(seed + 3, rank, size).bfloat16())]
    with poisoned_buffers() as half_buffers:
        half_flat, handle = buffer_and_handle(answer(half, group_of_one()))
        handle.wait()
    unused = [parameter(draw(seed + 9, rank, size).bfloat16(), None), parameter(torch.ones(2).bfloat16(), None)]
    with comm.record() as unused_calls, poisoned_buffers():
        unused_flat, handle = buffer_and_handle(answer(unused, group_of_one()))
        handle.wait()
    laid = draw(seed + 5, rank, 2, size, 2, 3).contiguous(memory_format=torch.channels_last)
    try:
        turned_flat, handle = buffer_and_handle(answer([parameter(laid, laid.clone())], group_of_one()))
    except RuntimeError as error:
        raise AnswerError(
            f"the gradient of a convolution's weight in torch.channels_last: {error}\n"
            "likely slip: its elements do not lie in the order of its dimensions, so it has no flat view: `.flatten()`"
        ) from error
    handle.wait()
    own = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().cpu() for p in bucket])
    return {
        "calls": told(calls),
        "phases": at_return,
        "buffers": [f"{size} bytes of {role}" for size, role in buffers],
        "unwritten": [*(each.unwritten for each in sent), unwritten],
        "flat": flat.detach().cpu(),
        "apart": other_flat.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr(),
        "own": own,
        "none": [index for index, p in enumerate(bucket) if p.grad is None],
        "half": half_flat.detach().cpu(),
        "unused": unused_flat.detach().cpu(),
        "turned": turned_flat.detach().cpu(),
        "unused calls": told(unused_calls),
        "half buffers": [f"{size} bytes of {role}" for size, role in half_buffers],
    }


def buffer_and_handle(result: object) -> tuple[Tensor, Any]:
    match result:
        case (Tensor() as flat, handle) if hasattr(handle, "wait"):
            return flat, handle
    raise AnswerError(f"expected a buffer and a handle, got {type(result).__name__}")


@check("2.3")
def check_start_bucket(answer, variant):
    """One buffer, one all-reduce of all its bytes, on its way when the function returns; None counts as zero."""
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_start, answer, size, seed, timeout=SECONDS)
    rows = [flattened(seed, rank, size) for rank in range(n)]
    parts = [f"all_reduce of {4 * numel} bytes" for numel in (3 * size, 2 * size, 4)]
    weights = [
        torch.cat([draw(seed + 9, rank, *shape).flatten() for shape in ((size, 3), (2 * size,), (2, 2))])
        for rank in range(n)
    ]
    for rank, found in enumerate(seen):
        expect(
            "buffers that device.empty handed out",
            found["buffers"],
            [f"{rows[0].nbytes} bytes of communication"],
            rank=rank,
            slip="allocate one flat buffer of role 'communication' with device.empty, or nobody can count its bytes",
        )
        expect(
            "collectives",
            found["calls"],
            [f"all_reduce of {rows[0].nbytes} bytes"],
            rank=rank,
            slips={"an all-reduce per parameter: a bucket is there to pay the latency once": parts},
            slip=THROUGH_COMM,
        )
        expect(
            "what happened to the collective before the function returned",
            found["phases"],
            ["issue"],
            rank=rank,
            slip="waiting at once leaves nothing to overlap: wait where the bucket is finished",
        )
        at_issue, at_return = found["unwritten"]
        slips = {"the place of a gradient that is None must be zeroed: the buffer comes uninitialized": 2 * size}
        slip = "nothing was copied into the buffer: `part = ...` only gives a name to something else, part.copy_ writes"
        if at_return < at_issue:
            slip = "the copy comes after the all-reduce was issued, which has then sent what was there before"
        expect(
            "elements of the buffer not written yet when its all-reduce was issued",
            at_issue,
            0,
            rank=rank,
            slips=slips if rank == 0 and at_return == at_issue else None,
            slip=slip,
        )
        total = sum(rows)
        slips = {
            "the sum, not the mean": total,
            "divided by N twice": total / n**2,
            "the parameters were copied in, not their gradients": sum(weights) / n,
        }
        expect("the buffer after wait()", found["flat"], total / n, rank=rank, slips=slips)
        slip = "each call takes a buffer of its own: the last one may be under way still, and is freed when it ends"
        expect("whether a second call has another buffer", found["apart"], True, rank=rank, slip=slip)
        expect("the gradients themselves, before the bucket is finished", found["own"], rows[rank], rank=rank)
        expect(
            "indices of the gradients that are None, before the bucket is finished",
            found["none"],
            [1] if rank == 0 else [],
            rank=rank,
            slip="a gradient that is None stays so here: zero its part of the buffer, which needs no other memory",
        )
        expect(
            "buffers that device.empty handed out for a bucket of bfloat16",
            found["half buffers"],
            [f"{2 * size} bytes of communication"],
            rank=rank,
            slip="the buffer has the dtype of the bucket's parameters",
        )
        other = [draw(seed + 3, each, size).bfloat16() for each in range(n)]
        expect(
            "the buffer of a bucket of bfloat16, over a group of this rank alone",
            found["half"],
            other[rank],
            rank=rank,
            slips={"reduced over comm.world(): the ranks to average over are those of `group`": sum(other) / n},
            slip="N is the size of `group`, not a number known beforehand",
        )
        what = "of a bucket of bfloat16 that has no gradient at all"
        slip = "the other ranks may have gradients of it, and wait for this one"
        wanted = [f"all_reduce of {2 * (size + 2)} bytes"]
        expect(f"collectives {what}", found["unused calls"], wanted, rank=rank, slip=slip)
        expect(f"the buffer {what}", found["unused"], torch.zeros(size + 2).bfloat16(), rank=rank)
        expect(
            "the buffer of a convolution's weight in torch.channels_last",
            found["turned"],
            draw(seed + 5, rank, 2, size, 2, 3).flatten(),
            rank=rank,
            slip="its elements in the order of memory, and not in that of its dimensions: `.flatten()`",
        )
