"""Flat parameters that keep the strides of channels-last convolutions and their like, or align every parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.flat_param import FlatParameter


class StridedFlatParameter(FlatParameter):
    """A flat parameter in which each parameter keeps the order that it has in memory, for the kernels' sake.

    Attributes:
        strides: the parameters' strides; holes and overlaps are gone.
    """

    def _lay_out(self, originals: list[nn.Parameter]) -> None:
        super()._lay_out(originals)
        self.strides = [torch.empty_like(p, device="meta").stride() for p in originals]

    def shaped(self, index: int, values: Tensor) -> Tensor:
        return values.as_strided(self.shapes[index], self.strides[index])

    def flattened(self, index: int, values: Tensor) -> Tensor:
        outermost_first = sorted(range(values.dim()), key=lambda dim: -self.strides[index][dim])
        return values.permute(outermost_first).reshape(-1)


ALIGNMENT = 16  # bytes; vectorised kernels want it of the slices


class AlignedFlatParameter(StridedFlatParameter):
    """A flat parameter in which every parameter begins at a multiple of 16 bytes, when it is gathered.

    `sizes` alternates between parameters and the gaps behind them, the last of which is the padding; `numel` counts
    the gaps.

    Args:
        gathered_in: the dtype of gathered parameters; default: the parameters' own.
    """

    uniform_requires_grad = False

    def __init__(self, *args: Any, gathered_in: torch.dtype | None = None, **kwargs: Any) -> None:
        self._gathered_in = gathered_in
        super().__init__(*args, **kwargs)

    def _lay_out(self, originals: list[nn.Parameter]) -> None:
        super()._lay_out(originals)
        numels = [p.numel() for p in originals]
        step = max(1, ALIGNMENT // (self._gathered_in or originals[0].dtype).itemsize)
        gaps = [*(-numel % step for numel in numels[:-1]), 0]
        self.numel = sum(numels) + sum(gaps)
        self.padding = gaps[-1] = -self.numel % self.ranks
        self.sizes = [size for pair in zip(numels, gaps, strict=True) for size in pair]

    def unflatten(self, buffer: Tensor) -> list[Tensor]:
        return [self.shaped(index, part) for index, part in enumerate(torch.split(buffer, self.sizes)[::2])]

    def clear_padding(self, buffer: Tensor) -> None:
        for gap in torch.split(buffer, self.sizes)[1::2]:
            gap.zero_()

    def shard_bounds(self, index: int, rank: int) -> tuple[int, int]:
        return super().shard_bounds(2 * index, rank)
