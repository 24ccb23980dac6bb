"""Shards that `Module.to`, `Module.half` and their like have changed after wrapping.

They give a parameter other memory, perhaps of another dtype. (torch follows them until the first forward only.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from minifsdp import device
from minifsdp.fsdp.whole import WholeUnit
from minifsdp.private import identity


class RecastUnit(WholeUnit):
    """A unit whose unsharded memory is made anew when its shards have another dtype, or it was a view of theirs."""

    moved = (
        "An FSDP-managed module unexpectedly has parameters on {}. Make sure to move the module to {} before training"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._home = self.flat.shard.device
        self._is_view = self._shares_memory

    @property
    def _shares_memory(self) -> bool:
        return identity(self.full.untyped_storage()) == identity(self.flat.shard.untyped_storage())

    def follow(self) -> None:
        self.adapt()
        super().follow()

    @contextmanager
    def whole(self) -> Iterator[Tensor]:
        self.adapt()
        with super().whole() as full:
            yield full

    def adapt(self) -> None:
        """Fit the unsharded memory to the shards.

        Raises:
            RuntimeError: they were moved to another device.
        """
        flat, shard = self.flat, self.flat.shard
        if shard.device != self._home:
            text = self.moved.format(shard.device, self._home)
            raise RuntimeError(f"{text}: {', '.join(flat.names)} were there when they were wrapped.")
        if flat.full.dtype == shard.dtype and (not self._is_view or self._shares_memory):
            return
        self.free()
        flat.full = device.empty(flat.numel + flat.padding, shard.dtype, "unsharded", self.device)
        flat.views = flat.unflatten(flat.full)
        device.free(flat.full)
        self.full, views = self._make_full()
        self._target = self.full.data
        for leaf, view in zip(self.leaves, views, strict=True):
            leaf.data = view
