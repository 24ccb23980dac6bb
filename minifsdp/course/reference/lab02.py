"""Reference answers of lab 02, DDP."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.course.workshop.references import reference
from minifsdp.ddp import bucketed, naive
from minifsdp.ddp.overlapped import LaunchQueue, OverlappedDDP
from minifsdp.ddp.reducer import Reducer
from minifsdp.private import at_end_of_backward


@reference(
    "2.1",
    hints=(
        "The mean is a sum divided by N; `comm.MEAN` lets the all-reduce do both. Which tensor goes in: `param`, or "
        "what backward has left in it?",
        "`comm.all_reduce(tensor, group, op)` works in place and returns a handle. Give it `param.grad`, and `wait()`.",
    ),
    forbids=(naive.NaiveDDP.sync_gradients,),
)
def average_gradient(param: nn.Parameter, group: comm.Group) -> None:
    """Replace `param.grad` by its mean over the ranks, in place."""
    assert param.grad is not None
    comm.all_reduce(param.grad, group, comm.MEAN).wait()


@reference(
    "2.2",
    hints=(
        "Walk through `reversed(params)` and add each to the open bucket of its dtype. If there is none, a new one "
        "begins; once a bucket is full it is open no longer.",
        "Keep the open bucket of each dtype in a dict, and append it to the result when it begins. After adding, sum "
        "numel * element_size of its parameters; if that is >= cap_bytes, delete it from the dict.",
    ),
    forbids=(bucketed.assign_buckets,),
)
def assign_buckets(params: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Cut `params` into buckets in reverse order; each holds one dtype and is closed once it has `cap_bytes`."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in reversed(params):
        if param.dtype not in filling:
            filling[param.dtype] = []
            buckets.append(filling[param.dtype])
        bucket = filling[param.dtype]
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
            del filling[param.dtype]
    return buckets


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
    """Copy the bucket's gradients into one flat buffer and start its all-reduce."""
    sizes = [param.numel() for param in bucket]
    flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
    for part, param in zip(flat.split(sizes), bucket, strict=True):
        if param.grad is None:
            part.zero_()
        else:
            part.copy_(param.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@reference(
    "2.4",
    hints=(
        "The order is: wait, copy, free. A gradient must own its memory, since the buffer's is about to go.",
        "After `handle.wait()`, for each part of `flat.split([...])` in its parameter's shape: "
        "`param.grad.copy_` it, or `param.grad = part.clone()` where there was None. Then `device.free(flat)`.",
    ),
    forbids=(bucketed.BucketedDDP.sync_gradients, bucketed.finish_bucket),
)
def finish_bucket(bucket: list[nn.Parameter], flat: Tensor, handle: comm.Handle) -> None:
    """Wait for the bucket's all-reduce, copy the means back into the gradients, free the buffer."""
    handle.wait()
    for part, param in zip(flat.split([param.numel() for param in bucket]), bucket, strict=True):
        mean = part.view(param.shape)
        if param.grad is None:
            param.grad = mean.clone()
        else:
            param.grad.copy_(mean)
    device.free(flat)


@reference(
    "2.5",
    hints=(
        "`len(reducer.in_flight)` is the number of buckets launched, and so also the number of the one whose turn it "
        "is. One gradient can complete that bucket and find those behind it full already.",
        "Count down `reducer.missing[reducer.bucket_of[param]]`. Then, while there is a bucket whose turn it is and it "
        "misses nothing, append `reducer.start(bucket)` to `in_flight`. Once all are in flight, "
        "`at_end_of_backward(reducer.finish)`.",
    ),
    forbids=(OverlappedDDP.on_gradient, LaunchQueue.launch_full, Reducer.on_gradient, Reducer.mark_ready),
)
def on_gradient(param: nn.Parameter, reducer: SimpleNamespace) -> None:
    """The hook of every parameter: count its gradient, launch the buckets that are full and whose turn it is."""
    if not reducer.sync:
        return
    buckets, in_flight = reducer.buckets, reducer.in_flight
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
        in_flight.append(reducer.start(buckets[len(in_flight)]))
    if len(in_flight) == len(buckets):
        at_end_of_backward(reducer.finish)


@reference(
    "2.6",
    hints=(
        "`backward` adds to `.grad`, so k backward passes give the sum of k gradients. What makes it the gradient of "
        "the mean? And which of the k backward passes may communicate?",
        "For each micro-batch: set `reducer.sync` to whether it is the last, then "
        "`(loss_of(batch) / len(micro_batches)).backward()`.",
    ),
)
def accumulate(micro_batches: list[Tensor], loss_of: Callable[[Tensor], Tensor], reducer: SimpleNamespace) -> None:
    """The gradient of the mean loss over the micro-batches, communicated once."""
    for number, batch in enumerate(micro_batches, start=1):
        reducer.sync = number == len(micro_batches)
        (loss_of(batch) / len(micro_batches)).backward()
