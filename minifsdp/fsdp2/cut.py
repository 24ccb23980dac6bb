"""Individually sharded parameters, and the buffer in which their pieces are sent together.

    w [5, d], b [4] on 2 ranks        gathered [N, S]                      unsharded [N * S]
    rank 0   w 0-2 | b 0-1            w 0-2      | b 0-1 | gap             w 0-2 w 3-4 pad | b 0-1 b 2-3 | gap
    rank 1   w 3-4 | b 2-3            w 3-4, pad | b 2-3 | gap

A collective needs *rank order*: row r holds rank r's pieces of all parameters. A computation needs *parameter order*,
in which the pieces of each parameter are contiguous. One order is a transposition of the other. Sharding parameters
individually therefore costs a copy before each collective and another after it. A flat parameter has views instead
(layout.py), and pieces that begin and end anywhere (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: where a rank's share is no multiple of it, NCCL falls back to slower copies (NCCL issue 413)


@dataclass(frozen=True)
class Cut:
    """The division of one parameter among N ranks along a dimension, as by `torch.chunk`, with padded last pieces.

    Attributes:
        shape: shape of the unsharded parameter.
        dim: the dimension that is divided; any dimension but 0 has to be divisible by N.
        ranks: N.
    """

    shape: torch.Size
    dim: int
    ranks: int

    @cached_property
    def rows(self) -> int:
        """The length of a piece along `dim`, padding included."""
        return -(-self.shape[self.dim] // self.ranks)

    @cached_property
    def piece(self) -> torch.Size:
        """The shape of a rank's piece, padding included: the same on all ranks."""
        return torch.Size([*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :]])

    @cached_property
    def size(self) -> int:
        """The elements of a piece, padding included; at least one, which tells an empty gradient from none."""
        return max(1, prod(self.piece))

    def local(self, rank: int) -> torch.Size:
        """The shape of `rank`'s piece without padding: perhaps it is empty."""
        length = min(max(self.shape[self.dim] - rank * self.rows, 0), self.rows)
        return torch.Size([*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]])

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """`rank`'s piece of a tensor of the unsharded parameter's shape, without padding, as a view."""
        start = min(rank * self.rows, self.shape[self.dim])
        return whole.narrow(self.dim, start, self.local(rank)[self.dim])

    def whole(self, memory: Tensor) -> Tensor:
        """The parameter as a view of its memory [N * size] in parameter order."""
        if not self.shape.numel():
            return memory[:0].view(self.shape)
        if self.dim:
            return memory.view(self.shape)
        return memory.view(self.ranks * self.rows, *self.shape[1:])[: self.shape[0]]

    def by_rank(self, whole: Tensor) -> Tensor:
        """A tensor of the parameter's shape as its pieces [N, *piece], for a `dim` that divides evenly."""
        split: Tensor = whole.unflatten(self.dim, (self.ranks, self.rows))
        return split.movedim(self.dim, 0)


class Rows:
    """Buffers [N * S] in rank order.

    Parameters of several dtypes are sent as bytes, those of wide dtypes first, so that each begins at a multiple of its
    element size.

    Attributes:
        cuts, dtypes: the division and the dtype of each parameter.
        dtype: dtype of the buffers.
        sizes: number of elements in a row for each parameter, and for the gap that makes a row a multiple of 16 bytes.
        row: their sum, S.
        numel: N * S.
    """

    def __init__(self, cuts: Sequence[Cut], ranks: int, dtypes: Sequence[torch.dtype]) -> None:
        self.cuts, self.ranks, self.dtypes = cuts, ranks, dtypes
        self.dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.uint8
        self.sizes = [cut.size * each.itemsize // self.dtype.itemsize for cut, each in zip(cuts, dtypes, strict=True)]
        used = sum(self.sizes)
        self.gap = -used % max(1, ALIGNMENT // self.dtype.itemsize)
        self.sizes.append(self.gap)
        self.row = used + self.gap
        self.numel = ranks * self.row
        self._pieces: dict[int, list[tuple[torch.Size, tuple[int, ...], int]]] = {}  # by rank: shape, stride, offset

    def columns(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's pieces [N, size] in a buffer in rank order, and the gaps [N, gap]."""
        return list(buffer.view(self.ranks, self.row).split(self.sizes, 1))

    def parts(self, row: Tensor) -> list[Tensor]:
        """Each parameter's piece [size] of a row [S], and the gap [gap]."""
        return list(row.split(self.sizes))

    def memories(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's memory [N * size] in a buffer in parameter order, and the gaps [N * gap]."""
        return list(buffer.split([self.ranks * size for size in self.sizes]))

    def local(self, row: Tensor, rank: int) -> list[Tensor]:
        """`rank`'s piece of each parameter, without padding and in its shape, as views of its row [S]."""
        if rank not in self._pieces:
            self._pieces[rank] = self._pieces_of(rank)
        if self.dtype is torch.uint8:
            pieces = zip(self._pieces[rank], self.dtypes, strict=True)
            return [row[at : at + prod(s) * d.itemsize].view(d).view(s) for (s, _, at), d in pieces]
        begin = row.storage_offset()
        return [row.as_strided(shape, stride, begin + at) for shape, stride, at in self._pieces[rank]]

    def _pieces_of(self, rank: int) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        shapes, begins = [cut.local(rank) for cut in self.cuts], accumulate(self.sizes, initial=0)
        return [(s, torch.empty(s, device="meta").stride(), at) for s, at in zip(shapes, begins, strict=False)]

    @property
    def transposes(self) -> bool:
        """True if a parameter is cut along another dimension than 0, so that its pieces interleave."""
        return any(cut.dim for cut in self.cuts)
