"""The unsharded gradient of a flat parameter: collected leaf by leaf, completed, passed to a reduction, and reused."""

from __future__ import annotations

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.layout import Layout


class Gradient:
    """A buffer [P] that exists from `begin` until its reduction has read it.

    Attributes:
        full: the buffer; None while nothing has been collected.
        missing: the parameters, by index, whose gradients have not been collected.

    Args:
        layout: layout of the buffer.
        on: device of the buffer.
    """

    def __init__(self, layout: Layout, on: torch.device) -> None:
        self.layout, self.device = layout, on
        self._spare: tuple[Tensor, list[Tensor]] | None = None  # a freed buffer and its views, to be used again
        self._forget()

    def _forget(self) -> None:
        self.full: Tensor | None = None
        self.views: list[Tensor] = []
        self.missing = set(range(len(self.layout.shapes)))

    def begin(self, dtype: torch.dtype) -> Tensor:
        """Allocate the buffer; nothing has been collected."""
        spare, self._spare = self._spare, None
        if spare is not None and spare[0].dtype == dtype:
            self.full, self.views = spare
            device.allocate(self.full)
        else:
            self.full = device.empty(self.layout.padded, dtype, "gradients", self.device)
            self.views = self.layout.views(self.full)
        return self.full

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of parameter `index`."""
        if index in self.missing:
            self.missing.remove(index)
            self.views[index].copy_(gradient)
        else:  # a backward inside no_sync came before
            self.views[index].add_(gradient)

    def collected(self) -> list[Tensor | None]:
        """The gradient of each parameter so far, as a view of the buffer."""
        return [None if index in self.missing else self.views[index] for index in range(len(self.layout.shapes))]

    def drop(self, index: int | None = None) -> None:
        """Forget what has been collected of parameter `index`, or of all."""
        self.missing |= {index} if index is not None else set(range(len(self.layout.shapes)))
        if self.full is not None and len(self.missing) == len(self.layout.shapes):
            device.free(self.full)
            self._forget()

    # A rank whose data has not reached the unit still takes part in its reduction. It sends -0.0, the sum over
    # nothing: x + -0.0 is x for every x, 0.0 too, and -0.0 + -0.0 is -0.0. So if nothing but -0.0 comes back, no rank
    # had a gradient, and `.grad` stays as it was, as in one process (`is_of_nobody`).

    def complete(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The whole gradient in `dtype`, zero where nothing was collected; the next `begin` makes another.

        Returns:
            the buffer [P] and its views, now owned by the caller, to keep or to give back.
        """
        if self.full is None:
            full = self.begin(dtype).fill_(-0.0)
        else:
            full = self.full
            for index in self.missing:
                self.views[index].zero_()
            self.layout.clear_gaps(full)
        views = self.views
        if full.dtype != dtype:
            low = device.empty(full.numel(), dtype, "gradients", self.device).copy_(full)
            device.free(full)
            full, views = low, self.layout.views(low)
        self._forget()
        return full, views

    def give_back(self, full: Tensor, views: list[Tensor]) -> None:
        """The reduction has read what `complete` has returned."""
        device.free(full)
        self._spare = full, views


def is_of_nobody(mean: Tensor) -> bool:
    """True if no rank had a gradient; on CUDA the host waits for the answer."""
    return bool((mean.eq(0) & mean.signbit()).all())
