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
        was_empty: nothing had been collected when `complete` was last called.

    Args:
        layout: layout of the buffer.
        on: device of the buffer.
    """

    def __init__(self, layout: Layout, on: torch.device) -> None:
        self.layout, self.device = layout, on
        self.was_empty = False
        self._reduced: tuple[Tensor, list[Tensor]] | None = None  # what `complete` has returned, and its views
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

    def complete(self, dtype: torch.dtype) -> Tensor:
        """The gradient [P] in `dtype`, zero where nothing was collected; if nothing at all, -0.0 (delivery.py).

        The next `begin` makes another.
        """
        self.was_empty = self.full is None
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
        self._reduced = full, views
        self._forget()
        return full

    def release(self, is_mean: bool) -> None:
        """The reduction has read what `complete` has returned, or has made it the mean: then it is kept."""
        reduced, self._reduced = self._reduced, None
        if not is_mean and reduced is not None:
            device.free(reduced[0])
            self._spare = reduced
