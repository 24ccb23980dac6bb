"""A batch: the rows of a rank, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""(tokens, targets), each [batch, context] int64; a target is the token that follows."""


def shard(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows of `rank`: [batch / N, context] each.

    Raises:
        ValueError: N does not divide the batch, so that the mean over ranks would not be the mean over rows.
    """
    rows = batch[0].shape[0]
    if rows % ranks:
        raise ValueError(f"a batch of {rows} sequences cannot be shared equally by {ranks} ranks: choose a multiple")
    mine = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    return batch[0][mine], batch[1][mine]


def to_device(batch: Batch, where: torch.device) -> Batch:
    """The batch on a device, without blocking the host: on CUDA it is copied from pinned memory.

    A copy from unpinned memory synchronizes the host with the stream. A batch already on the device is not copied.
    """
    tokens, targets = (
        rows.pin_memory().to(where, non_blocking=True) if where.type == "cuda" and not rows.is_cuda else rows
        for rows in batch
    )
    return tokens, targets
