"""Gradients of a unit's parameters, kept as autograd has computed them, and packed once all of them are complete.

    leaf.grad, leaf.grad, ... --chunk, pad, concatenate--> gradient [N, S'] --reduce-scatter--> mean [S']

Row r consists of the pieces that rank r keeps, one for each trainable parameter, divided as by `torch.chunk`. Frozen
parameters have no column, so they cost no memory here and no bytes on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp import device, private
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.held import Held, Recorded


class Gradients:
    """The gradients that backward has computed so far.

    Args:
        cuts: division of all parameters, by index.
        on: device of the gradients.

    Attributes:
        held: those that are not packed yet, by index.
        keeper: releases packed buffers, which the reductions' stream reads last.
    """

    def __init__(self, cuts: Sequence[Cut], on: torch.device) -> None:
        self.cuts, self.device = cuts, on
        self.held: dict[int, Tensor] = {}
        self.keeper: Held | Recorded = Held()
        self._rows: dict[Any, Rows] = {}  # by what they depend on

    def add(self, index: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add the gradient of parameter `index`; the sum is kept in `dtype`."""
        held = self.held.get(index)
        self.held[index] = gradient.to(dtype) if held is None else held.to(dtype).add_(gradient)
        if self.held[index] is not held:
            device.retag(self.held[index], "gradients")

    def check_trained(self, trained: Sequence[int], names: Sequence[str]) -> None:
        """
        Raises:
            RuntimeError: a parameter is frozen while its gradient waits for a reduction.
        """
        if left := self.held.keys() - trained:
            raise RuntimeError(
                f"{names[min(left)]} was frozen while gradients of earlier micro-batches wait for their reduction: "
                "freeze it after a backward with gradient sync"
            )

    # Where a rank has no gradient it sends -0.0 (delivery.py), in the padding too, which otherwise is +0.0.

    def pack(self, trained: list[int], ranks: int, dtype: torch.dtype) -> tuple[Tensor, Rows, list[int]]:
        """Everything in one buffer, which the caller now has; nothing is held any longer.

        Args:
            trained: the parameters that have a column.
            ranks: number of rows, N.
            dtype: of the reduction.

        Returns:
            the buffer [N * S'], its layout, and the parameters of which nothing was held.
        """
        rows = self.layout_of(trained, ranks, dtype)
        held, self.held = self.held, {}
        absent = [index for index in trained if index not in held]
        packed = device.empty(rows.numel, dtype, "gradients", self.device)
        if len(absent) == len(trained):
            return packed.fill_(-0.0), rows, absent
        parts = [self._by_rank(index, held, dtype) for index in trained]
        gaps = parts[0].new_zeros(ranks, rows.gap, dtype=dtype)
        private.chunk_cat([*parts, gaps] if rows.gap else parts, ranks, packed.view(ranks, rows.row))
        if absent:
            columns = rows.columns(packed)
            for index in absent:
                columns[trained.index(index)].fill_(-0.0)
        return packed, rows, absent

    def layout_of(self, trained: Sequence[int], ranks: int, dtype: torch.dtype) -> Rows:
        """The layout of a buffer in which these parameters have a column."""
        key = tuple(trained), ranks, dtype
        if key not in self._rows:
            self._rows[key] = Rows([self.cuts[index] for index in trained], ranks, [dtype] * len(trained))
        return self._rows[key]

    def _by_rank(self, index: int, held: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        """The gradient of parameter `index`, of which equal parts along dimension 0 are the ranks' pieces."""
        cut, gradient = self.cuts[index], held.get(index)
        if gradient is None or not gradient.numel():
            return torch.zeros(cut.ranks, cut.size, dtype=dtype, device=self.device)
        gradient = gradient if gradient.dtype is dtype else gradient.to(dtype)
        return cut.by_rank(gradient).reshape(cut.ranks, cut.size) if cut.dim else gradient
