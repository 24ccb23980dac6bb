"""Two collectives for the gloo backend, made of others that it does better.

Torch's ProcessGroupGloo reduces a whole clone over all ranks and copies a part of it out, and gathers into a buffer of
its own that it copies from (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). P elements, N ranks:

                      each rank sends     kept beside
    reduce-scatter    2 (N - 1) / N P     P                gloo's own: an all-reduce
                        (N - 1) / N P     (N - 1) / N P    here: all to all, and every rank sums what it has received
    all-gather          (N - 1) / N P     P                gloo's own
                        (N - 1) / N P     0                here: a broadcast from every rank, straight into its place

`comm` decides where these take the place of the backend's. `MINIFSDP_REDUCE_SCATTER` says so of the first: `auto` (on
gloo), `native` (nowhere), or `alltoall` (everywhere).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import device

CHOICES = {"auto": None, "native": False, "alltoall": True}
wanted = os.environ.get("MINIFSDP_REDUCE_SCATTER", "auto")  # read once: to ask costs as much as to start a message
TAG = 1  # of our sends and receives: a user's have 0 unless they say so


def reduces_by_all_to_all(backend: str, ranks: int) -> bool:
    """Whether a reduce-scatter over so many ranks is an all-to-all and a sum, with memory of ours for what arrives.

    Raises:
        ValueError: MINIFSDP_REDUCE_SCATTER is none of the three.
    """
    if wanted not in CHOICES:
        raise ValueError(f"MINIFSDP_REDUCE_SCATTER={wanted}: set it to one of {', '.join(CHOICES)}, or not at all")
    chosen = CHOICES[wanted]
    return ranks > 1 and (backend == "gloo" if chosen is None else chosen)


class Works:
    """Several messages under way: what `torch.distributed` calls a work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def gather_by_broadcasts(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Works:
    """`output` [N * numel] <- every rank's `shard` [numel], see `comm.all_gather`."""
    parts = output.view(group.size(), *shard.shape).unbind()  # fails alike on all ranks where sizes are wrong
    mine = parts[group.rank()]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    return Works([dist.broadcast(part, group=group, group_src=r, async_op=True) for r, part in enumerate(parts)])


def exchange(received: Tensor, full: Tensor, group: dist.ProcessGroup) -> Works:
    """`received` [N - 1, numel] <- this rank's part of every other rank's `full` [N * numel], in rank order."""
    parts, rank = full.view(group.size(), -1), group.rank()
    others = [r for r in range(group.size()) if r != rank]
    arriving = [dist.irecv(row, group=group, group_src=r, tag=TAG) for row, r in zip(received, others, strict=True)]
    return Works([*arriving, *(dist.isend(parts[r], group=group, group_dst=r, tag=TAG) for r in others)])


def sum_parts(output: Tensor, received: Tensor, mine: Tensor, rank: int, is_mean: bool) -> None:
    """`output` [numel] <- the sum or mean of `received` [N - 1, numel], which is freed, and `mine` [numel].

    In rank order, so that who sums makes no difference.
    """
    parts = [*received[:rank].unbind(), mine, *received[rank:].unbind()]
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)
    if is_mean:
        output.div_(len(parts))
    device.free(received)
