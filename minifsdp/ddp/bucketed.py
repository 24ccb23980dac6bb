"""Rung 2 of DDP: one all-reduce per bucket."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def assign_buckets(params: Iterable[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Cut `params` into buckets in reverse order, the order in which backward makes their gradients.

    A bucket holds one dtype on one device, and is closed once it has reached `cap_bytes` (as in torch, a parameter is never
    split, so a bucket may exceed the cap by a part of its last parameter; `_compute_bucket_assignment_by_size`).
    """
    buckets: list[list[nn.Parameter]] = []
    size = cap_bytes
    for p in reversed(list(params)):
        if size >= cap_bytes or (p.dtype, p.device) != (buckets[-1][0].dtype, buckets[-1][0].device):
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel() * p.element_size()
    return buckets
