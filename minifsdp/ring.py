"""Collectives from send and recv: the ring.

The N ranks stand in a ring, and the tensor is cut into N chunks. In each of N - 1 steps every rank sends one chunk to
the rank on its right (r + 1) and receives one from its left (r - 1). Chunk numbers of rank r, all modulo N:

    step s = 0 .. N-2     sends            receives         after the last step
    reduce-scatter        r - 1 - s        r - 2 - s        rank r holds chunk r of the sum
    all-gather            r - s            r - 1 - s        every rank holds every chunk

What a rank receives in step s is what it sends in step s + 1. For N = 4, the chunk that each rank sends:

    rank                   0  1  2  3
    reduce-scatter, s=0    3  0  1  2      a partial sum goes round and takes up one rank's chunk at each stop;
                    s=1    2  3  0  1      that of chunk c sets out from rank c + 1 and ends on rank c
                    s=2    1  2  3  0
    all-gather,     s=0    0  1  2  3      a whole chunk goes round and leaves a copy at each stop
                    s=1    3  0  1  2
                    s=2    2  3  0  1

Each of the two sends N - 1 chunks per rank: (N - 1) / N of the tensor, padded to a multiple of N. For an all-reduce
that is both together, and no algorithm sends less (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations").
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group, Handle

Op = Literal["sum", "mean"]


@torch.no_grad()
def all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> None:
    """`tensor` [any shape] <- its sum or mean over the ranks, in place, the same bits on all of them.

    A reduce-scatter, then an all-gather: 2 (N - 1) / N of the padded tensor's bytes leave each rank.

    Raises:
        ValueError: as `reduce_scatter`.
    """
    chunks = _cut(tensor, group.size())
    mine = chunks[group.rank()]
    reduce_scatter(mine, chunks, group, op)
    all_gather(chunks, mine, group)
    _paste(chunks, tensor)


@torch.no_grad()
def reduce_scatter(output: Tensor, full: Tensor, group: Group, op: Op = "sum") -> None:
    """`output` [ceil(numel / N)] <- chunk r of the sum or mean over the ranks of `full` [numel], which is only read.

    `output` may be chunk r of `full` itself. Where N does not divide numel, the last chunks end in zeros.

    Raises:
        ValueError: `output` is not one chunk long; `op` is neither sum nor mean; the mean of whole numbers.
    """
    rank, ranks = group.rank(), group.size()
    chunks = _cut(full, ranks)
    _check_chunk(output, chunks)
    _check_op(op, full)
    partial = chunks[(rank - 1) % ranks]
    for step in range(ranks - 1):
        arriving = device.empty(partial.numel(), full.dtype, "communication", full.device)
        _pass_on(partial, arriving, group)
        partial = arriving.add_(chunks[(rank - 2 - step) % ranks])
    output.copy_((partial / ranks if op == "mean" else partial).view_as(output))


@torch.no_grad()
def all_gather(output: Tensor, shard: Tensor, group: Group) -> None:
    """`output` [numel] <- every rank's `shard` [ceil(numel / N)], in rank order and without the padding.

    `shard` may be chunk r of `output` itself.

    Raises:
        ValueError: `shard` is not one chunk long.
    """
    rank, ranks = group.rank(), group.size()
    chunks = _cut(output, ranks)
    _check_chunk(shard, chunks)
    chunks[rank].copy_(shard.reshape(-1))
    for step in range(ranks - 1):
        _pass_on(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
    _paste(chunks, output)


def pass_on(outgoing: Tensor, incoming: Tensor, group: Group) -> list[Handle]:
    """Send `outgoing` to the right and receive `incoming` from the left, of the same size; what to wait for.

    Both are posted before either is waited for: if every rank first waited for its send, none would receive. On NCCL
    the two may share a stream and run in the order of posting, so odd ranks post the receive first.
    """
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    if group.rank() % 2 == 0:
        return [comm.send(outgoing, right, group), comm.recv(incoming, left, group)]
    return [comm.recv(incoming, left, group), comm.send(outgoing, right, group)]


def _pass_on(outgoing: Tensor, incoming: Tensor, group: Group) -> None:
    for handle in pass_on(outgoing, incoming, group):
        handle.wait()


def _cut(tensor: Tensor, ranks: int) -> Tensor:
    """`tensor` as chunks [N, ceil(numel / N)]: its own memory, or a copy where it must be padded or made contiguous."""
    flat = tensor.reshape(-1)
    length = -(-flat.numel() // ranks)
    if flat.numel() == ranks * length:
        return flat.view(ranks, length)
    padded = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
    padded[: flat.numel()] = flat
    return padded.view(ranks, length)


def _paste(chunks: Tensor, tensor: Tensor) -> None:
    """The way back from `_cut`: the chunks' elements into `tensor`, where they are a copy; the padding is dropped."""
    if chunks.data_ptr() != tensor.data_ptr():
        tensor.copy_(chunks.view(-1)[: tensor.numel()].view_as(tensor))


def _check_chunk(chunk: Tensor, chunks: Tensor) -> None:
    ranks, length = chunks.shape
    if chunk.numel() != length:
        raise ValueError(f"the shard has {chunk.numel()} elements; over {ranks} ranks it must have {length}")
    if chunk.dtype != chunks.dtype:
        raise ValueError(f"the shard is {chunk.dtype}, the full tensor {chunks.dtype}: give both the same dtype")


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"op is {op!r}: give 'sum' or 'mean'")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} is no {tensor.dtype}: sum, or convert to a floating dtype first")
