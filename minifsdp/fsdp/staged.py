"""A shard that is not what its rank sends: it has another dtype, or lies elsewhere."""

from __future__ import annotations

from torch import Tensor

from minifsdp.fsdp.flat_unit import FlatUnit


class StagedUnit(FlatUnit):
    """Casts or moves the shard straight to its place in the gathered buffer; the gather then works in place.

    So there is no buffer for the low-precision shard (torch has one: `_mp_shard`), and none for its copy on the device.
    """

    def _outgoing(self, full: Tensor) -> Tensor:
        return self.mine(full).copy_(self.flat.shard.data, non_blocking=True)
