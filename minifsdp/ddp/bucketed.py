"""Rung 2 of DDP: one all-reduce per bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.ddp.naive import NaiveDDP, gradients
from minifsdp.layout import Layout
from minifsdp.local_parts import local_of
from minifsdp.private import foreach_copy

Kind = tuple[torch.dtype, torch.device]


class BucketedDDP(NaiveDDP):
    """`NaiveDDP` with fewer, larger messages, because each collective costs a latency, however little it sends.

    Bytes: the staging buffer of a bucket exists only while that bucket is reduced, so at most one is alive, and the
    gradients' peak is 4Ψ + the largest bucket for Ψ fp32 parameters.

    Args:
        module: the model, as for `NaiveDDP`.
        process_group: the ranks to average over; all of them by default.
        bucket_cap_mb: size in MiB at which a bucket is closed; 0 gives each parameter its own.
    """

    def __init__(self, module: nn.Module, process_group: comm.Group | None = None, bucket_cap_mb: float = 25) -> None:
        super().__init__(module, process_group)
        self.buckets = assign_buckets(self.trainable, int(bucket_cap_mb * 2**20))

    def sync_gradients(self) -> None:
        """Replace every `.grad` by its mean over the ranks, one bucket after the other."""
        for params in self.buckets:
            finish_bucket(start_bucket(params, self.process_group))


class InFlight(NamedTuple):
    """A bucket that is being reduced.

    Attributes:
        params: the parameters whose gradients are in it.
        flat: the staging buffer [sum of the parameters' numel].
        views: the part of it that belongs to each parameter, in that parameter's shape.
        reduction: its all-reduce; wait for it before the buffer is read or freed.
    """

    params: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    reduction: comm.Handle


@torch.no_grad()
def start_bucket(params: list[nn.Parameter], group: comm.Group) -> InFlight:
    """Copy the gradients into a buffer, with zeros for missing ones, and start its all-reduce."""
    layout = Layout.of(params)
    flat = device.empty(layout.numel, params[0].dtype, "communication", params[0].device)
    views = layout.views(flat)
    foreach_copy(views, gradients(params))
    return InFlight(params, flat, views, comm.all_reduce(flat, group, comm.MEAN))


@torch.no_grad()
def finish_bucket(bucket: InFlight) -> None:
    """Wait for the means, copy them back into the gradients, free the buffer."""
    bucket.reduction.wait()
    foreach_copy(gradients(bucket.params), bucket.views)
    device.free(bucket.flat)


def assign_buckets(params: Iterable[nn.Parameter], cap_bytes: int | Sequence[int]) -> list[list[nn.Parameter]]:
    """Divide `params` into buckets in reverse order, the order in which backward computes their gradients.

    A bucket holds one dtype on one device, and is closed once it has reached `cap_bytes` (as in torch, a parameter is
    never split, so a bucket may exceed the cap by a part of its last parameter; `_compute_bucket_assignment_by_size`).
    One bucket of each dtype and device is open at a time, and buckets are in the order in which they begin. If there
    are several caps, each applies to one bucket of a dtype and device, and the last applies to all further ones.
    """
    caps = [cap_bytes] if isinstance(cap_bytes, int) else list(cap_bytes)
    buckets: list[list[nn.Parameter]] = []
    filling: dict[Kind, list[nn.Parameter]] = {}
    size: dict[Kind, int] = {}
    left: dict[Kind, list[int]] = defaultdict(lambda: caps)  # those that have not had their turn, and the last
    for p in reversed(list(params)):
        kind = p.dtype, p.device
        if kind not in filling:
            filling[kind], size[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(p)
        size[kind] += local_of(p).nbytes
        if size[kind] >= left[kind][0]:
            del filling[kind]
            left[kind] = left[kind][1:] or left[kind]
    return buckets
