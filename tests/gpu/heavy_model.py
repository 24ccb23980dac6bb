"""A stack of units in which a GPU computes for milliseconds, so that the host is always ahead of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifsdp.instruments.launch import rank_device


class Size(NamedTuple):
    """Matrix products take 2 * rows * width² operations each; a unit holds layers * width² * 4 bytes."""

    units: int
    layers: int
    width: int
    rows: int

    def batch(self) -> Tensor:
        """[rows, width]"""
        generator = torch.Generator().manual_seed(2)
        return torch.randn(self.rows, self.width, generator=generator).to(rank_device())


class Layers(nn.Sequential):
    """A unit."""

    def __init__(self, size: Size) -> None:
        super().__init__(*(nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers)))


class Stack(nn.Module):
    """The units one after the other, then one number per row: a root with parameters of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Layers(size) for _ in range(size.units))
        self.head = nn.Linear(size.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(x) / x.shape[1] ** 0.5
        loss: Tensor = self.head(x).square().mean()
        return loss
