"""NO_SHARD: a flat parameter that every rank holds whole. What is left of FSDP is DDP with a bucket per unit."""

from __future__ import annotations

from torch import nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.unit import UNSHARDED


class ReplicatedUnit(FlatUnit):
    """A unit on the same schedules whose gather and free have nothing to do; its gradient is all-reduced in place.

    Args:
        flat: the flat parameter, cut into one shard.
        group: the process group of the replicas.
    """

    def __init__(self, flat: FlatParameter, group: Group, name: str = "unit") -> None:
        super().__init__(flat, group, name, reshard_after_forward=False)
        trains = flat.shard.requires_grad
        self.leaves = [nn.Parameter(view, trains) for view in flat.unflatten(flat.shard.data)]
        self._place(self.leaves)
        self.state = UNSHARDED

    def free(self) -> None: ...

    def store(self) -> None: ...

    def _reduce(self) -> Handle:
        return comm.all_reduce(self._complete_gradient(), self.group, comm.MEAN)

    def _accumulate(self) -> None:
        if self.flat.shard.grad is None:
            self.flat.shard.grad = self._reduced  # the optimizer's from here on
        else:
            self.flat.shard.grad.add_(self._reduced)
            device.free(self._reduced)
        del self._reduced
