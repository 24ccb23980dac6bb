"""Parameters that do not lie in memory row by row, such as the weights of a convolution in channels-last order."""

from __future__ import annotations

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
