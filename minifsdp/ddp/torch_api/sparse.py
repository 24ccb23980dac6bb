"""Sparse gradients, which consist of some rows of their parameter, as those of an embedding with `sparse=True`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.ddp.buckets import Bucket, Reduction


def sparse_buckets(module: nn.Module) -> dict[nn.Parameter, type[Bucket]]:
    """The weights of embeddings with sparse gradients, and their kind of bucket."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    return {p: SparseBucket for m in embeddings for p in m.parameters()}


class SumOfRows:
    """The reduction of a bucket to the sum over the ranks: every rank gathers all rows, and adds equal indices.

    Ranks have different numbers of rows, but a gather needs equal parts. So the ranks first gather the numbers of rows,
    for which the host waits. Then they gather the rows, padded to the largest of these numbers, into a "communication"
    buffer of N times that size, which exists only during `wait`, first for the indices and then for the values. (gloo
    sums sparse tensors in the same three steps: ProcessGroupGloo.cpp.)
    """

    def __init__(self, bucket: SparseBucket, group: comm.Group) -> None:
        self.bucket, self.group = bucket, group
        self.mine = bucket.flat.coalesce()  # its rows in order, each once
        self.numbers = device.empty(group.size(), torch.int64, "communication", self.mine.device)
        own = self.numbers[group.rank()].view(1).fill_(len(self.mine.values()))
        self.counting = comm.all_gather(self.numbers, own, group)

    def wait(self) -> None:
        self.counting.wait()
        numbers = self.numbers.tolist()
        device.free(self.numbers)
        indices = self.gather(self.mine.indices().t(), numbers)
        values = self.gather(self.mine.values(), numbers)
        self.bucket.flat = torch.sparse_coo_tensor(indices.t(), values, self.mine.shape).coalesce()

    def gather(self, rows: Tensor, numbers: list[int]) -> Tensor:
        """The ranks' `rows` [number of this rank, ...], one rank's after the other's [sum of the numbers, ...]."""
        most, ranks = max(numbers), self.group.size()
        if most == 0:
            return rows
        buffer = device.empty(ranks * most * math.prod(rows.shape[1:]), rows.dtype, "communication", rows.device)
        parts = buffer.view(ranks, most, *rows.shape[1:])
        own = parts[self.group.rank()]
        own[: len(rows)] = rows
        comm.all_gather(buffer, own.view(-1), self.group).wait()
        gathered = torch.cat([part[:number] for part, number in zip(parts, numbers, strict=True)])
        device.free(buffer)
        return gathered


class SparseBucket(Bucket):
    """The gradient of one parameter, which is its own buffer.

    `flat` is a sparse tensor of the parameter's shape, a new one with each backward.
    """

    def allocate(self) -> None:
        """Rows of zeros, none of them."""
        (param,) = self.params
        indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
        self.flat = torch.sparse_coo_tensor(indices, param.new_empty(0, *param.shape[1:]), param.shape)

    def of_zeros(self) -> SparseBucket:
        bucket = SparseBucket(self.params)
        bucket.allocate()
        return bucket

    def fill(self, param: nn.Parameter, is_used: bool, weight: float | None, incoming: Tensor | None) -> None:
        if param.grad is None:
            self.allocate()
        elif not param.grad.is_sparse:
            raise RuntimeError(
                f"Expected variable to have sparse gradient. The weight {list(param.shape)} of an embedding with "
                "sparse=True is also used otherwise, which makes its gradient dense: pass sparse=False"
            )
        else:
            self.flat = param.grad.detach() if weight is None else param.grad.detach() * weight

    def start_sum(self, group: comm.Group) -> Reduction:
        return SumOfRows(self, group)

    def store(self, result: Tensor) -> None:
        self.flat.copy_(result)

    def scale(self, factor: Tensor) -> None:
        self.flat = self.flat.coalesce()
        self.flat.values().mul_(factor)

    def gradients_of(self, buffer: Tensor) -> list[Tensor]:
        return [buffer]

    def deliver(self, param: nn.Parameter) -> None:
        param.grad = self.flat

    def release(self) -> None:
        super().release()
        del self.flat
