"""The layout of a flat buffer: the parameter to which each element belongs, and the division among N ranks.

    buffer [P]   [ w1 ........ | b1 . | w2 .......... | padding ]     P elements, a multiple of N
    shards       [ rank 0       | rank 1       | rank 2         ]     P / N each, regardless of parameters' borders

DDP's buckets, ZeRO's buckets and FSDP's flat parameters each have a layout. Gradients, Adam's moments and all other
values with one element per element of the parameters are in buffers with the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Parameters one after the other, and the gaps between and after them.

    Attributes:
        shapes: the parameters' shapes.
        strides: their strides in the buffer, without holes or overlaps.
        gaps: for each parameter, the number of unused elements after it; the last gap is the padding.
        ranks: number of shards, N.
    """

    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    gaps: list[int]
    ranks: int = 1

    @classmethod
    def of(cls, params: Iterable[Tensor], ranks: int = 1, *, alignment: int = 1, keeps_strides: bool = False) -> Layout:
        """The layout of these parameters.

        Args:
            params: at least one; they may be on the meta device.
            ranks: number of shards, N.
            alignment: in elements; each parameter begins at a multiple of it, as vectorized kernels require.
            keeps_strides: keep the order in which each parameter is in memory, as channels-last kernels require,
                without holes and overlaps; otherwise parameters are stored row by row.
        """
        order = torch.preserve_format if keeps_strides else torch.contiguous_format
        dense = [torch.empty_like(p, device="meta", memory_format=order) for p in params]
        *gaps, _ = (-p.numel() % alignment for p in dense)
        padding = -(sum(p.numel() for p in dense) + sum(gaps)) % ranks
        return cls([p.shape for p in dense], [p.stride() for p in dense], [*gaps, padding], ranks)

    @cached_property
    def numels(self) -> list[int]:
        """Number of elements of each parameter."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def _sizes(self) -> list[int]:
        return [size for pair in zip(self.numels, self.gaps, strict=True) for size in pair]

    @cached_property
    def offsets(self) -> list[int]:
        """Index in the buffer of each parameter's first element."""
        return list(accumulate(self._sizes, initial=0))[:-1:2]

    @cached_property
    def padded(self) -> int:
        """Number of elements of a buffer, P."""
        return sum(self._sizes)

    @property
    def padding(self) -> int:
        """Number of elements at the end that belong to no parameter; fewer than `ranks`."""
        return self.gaps[-1]

    @property
    def numel(self) -> int:
        """Number of elements of a buffer without the padding."""
        return self.padded - self.padding

    # A whole buffer [P]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters in a buffer, as views in their shapes.

        By `split`, not by slices: its views share one base, and autograd and storage accounting see them as such.
        """
        return [self.shaped(index, part) for index, part in enumerate(torch.split(buffer, self._sizes)[::2])]

    @cached_property
    def _between(self) -> list[slice]:
        ends = [offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True)]
        return [slice(end, end + gap) for end, gap in zip(ends, self.gaps, strict=True) if gap]

    def clear_gaps(self, buffer: Tensor) -> None:
        """Zero the elements that belong to no parameter."""
        for gap in self._between:
            buffer[gap].zero_()

    def shaped(self, index: int, values: Tensor) -> Tensor:
        """A view in its shape of parameter `index`, whose values [numel] are as they lie in a buffer."""
        return values.as_strided(self.shapes[index], self.strides[index])

    def flattened(self, index: int, whole: Tensor) -> Tensor:
        """The inverse: the values [numel] of parameter `index` as they lie in a buffer."""
        outermost_first = sorted(range(whole.dim()), key=lambda dim: -self.strides[index][dim])
        return whole.permute(outermost_first).reshape(-1)

    # A shard [P / N]

    def shard(self, buffer: Tensor, rank: int) -> Tensor:
        """The part of a buffer that is `rank`'s shard."""
        size = self.padded // self.ranks
        return buffer[rank * size :][:size]

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """The elements `[low, high)` of `rank`'s shard that are parameter `index`'s; `low == high` if none are."""
        size, offset = self.padded // self.ranks, self.offsets[index]
        low, high = (min(max(edge - rank * size, 0), size) for edge in (offset, offset + self.numels[index]))
        return low, high

    def cut(self, shard: Tensor, rank: int) -> list[Tensor]:
        """Each parameter's part of `rank`'s shard, a view; empty where other ranks have all of it."""
        return [shard[slice(*self.bounds(index, rank))] for index in range(len(self.shapes))]

    def part(self, index: int, whole: Tensor, rank: int) -> Tensor:
        """The part of parameter `index`, a tensor of its shape, that is in `rank`'s shard."""
        return self.within(index, self.flattened(index, whole), rank)

    def within(self, index: int, values: Tensor, rank: int) -> Tensor:
        """The same part of its values [numel] as they lie in a buffer."""
        low, high = self.bounds(index, rank)
        start = max(rank * (self.padded // self.ranks) - self.offsets[index], 0)
        return values[start : start + high - low]
