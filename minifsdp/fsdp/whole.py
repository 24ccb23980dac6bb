"""A unit outside forward and backward: its values all at once, for `summon_full_params` and state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from minifsdp import device
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.unit import UNSHARDED


class WholeUnit(FlatUnit):
    """A unit that can show its values.

    Attributes:
        is_exposed: its modules have whole parameters at present.
    """

    is_exposed = False

    @contextmanager
    def whole(self) -> Iterator[Tensor]:
        """All values as one buffer [P] in the shards' dtype, gathered now: what a forward has left may be older."""
        was_unsharded = self.state is UNSHARDED
        self.free()
        full = self._assemble()
        try:
            yield full
        finally:
            if full is self.flat.full:
                device.free(full)
            if was_unsharded:
                self.start_gather()
                self.wait_gather()

    def _assemble(self) -> Tensor:
        device.allocate(self.flat.full)
        self.gather_into(self.flat.full.data).wait()
        return self.flat.full

    def store(self, full: Tensor) -> None:
        """Copy this rank's part of `full` [P] into the shard."""
        self.flat.shard.data.copy_(self.mine(full))

    def expose(self, full: Tensor) -> None:
        """Let the modules have their parameters again, as views of `full` [P]."""
        exposed = [nn.Parameter(view, self.flat.shard.requires_grad) for view in self.flat.unflatten(full)]
        for users, p in zip(self.places, exposed, strict=True):
            for place in users:
                place.module._parameters[place.attribute] = place.module.__dict__[place.attribute] = p

    def conceal(self) -> None:
        """The end of `expose`."""
        for place in (place for users in self.places for place in users):
            del place.module._parameters[place.attribute]
        self._hide()

    def _slices(self, shard: Tensor) -> list[Tensor]:
        """What each of `shards` has of a tensor [P / N] of the shard's layout."""
        return [shard]
