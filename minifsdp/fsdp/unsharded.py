"""The memory that a gather fills and the computation reads; if the dtypes agree, it is the flat parameter's own."""

from __future__ import annotations

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.plan import Plan
from minifsdp.private import identity, version_of


class Unsharded:
    """A buffer [P] in the compute dtype of a plan, freed at first, and the parameters as views of it.

    Attributes:
        full: the buffer.
        target: the same memory with a separate version counter, so that a gather does not count as a change of tensors
            that autograd has saved.
        views: the parameters, in their shapes.
        is_shard: nothing is sharded, and `full` is the shard's memory, so nothing is gathered or freed.
    """

    def __init__(self, flat: FlatParameter, plan: Plan, on: torch.device) -> None:
        self.flat, self.plan, self.device = flat, plan, on
        self._home = flat.shard.device
        self._make()

    def _make(self) -> None:
        shard, dtype = self.flat.shard, self.plan.compute or self.flat.shard.dtype
        self.is_shard = self.plan.inside is None and not self.plan.offload and dtype == shard.dtype
        if self.is_shard:
            self._planned = shard.data, self.flat.unflatten(shard.data)
        elif dtype == shard.dtype:
            self._planned = self.flat.full, self.flat.views
        else:
            full = device.empty(self.flat.layout.padded, dtype, "unsharded", self.device)
            self._planned = full, self.flat.unflatten(full)  # views can be made of memory that is there
            device.free(full)
        self._use(*self._planned)

    def _use(self, full: Tensor, views: list[Tensor]) -> None:
        self.full, self.target, self.views = full, full.data, views

    @property
    def writes(self) -> int:
        """The number of writes other than by gathers; 0 where they are to the shard."""
        return 0 if self.is_shard else version_of(self.full)

    def allocate(self) -> None:
        device.allocate(self.full)

    def free(self) -> None:
        if not self.is_shard:
            device.free(self.full)

    # What may change between steps, while it is freed

    def fits(self, exact: bool) -> bool:
        """True if the buffer is still valid: see `remake` and `choose`.

        Raises:
            RuntimeError: the shard was moved to another device.
        """
        shard = self.flat.shard
        if shard.device != self._home:
            text = _OFFLOADED_MOVED if self.plan.offload else _MOVED
            names = ", ".join(self.flat.names)
            raise RuntimeError(f"{text.format(shard.device, self._home)}: {names} were there when they were wrapped.")
        return self._fits_shard and self._wanted(exact)[0] is self.full

    @property
    def _fits_shard(self) -> bool:
        """`Module.to` and its like give a shard other memory, perhaps of another dtype.

        (torch follows them until the first forward only.)
        """
        shard = self.flat.shard
        if self.is_shard and identity(self._planned[0].untyped_storage()) != identity(shard.untyped_storage()):
            return False
        return self.flat.full.dtype == shard.dtype

    def _wanted(self, exact: bool) -> tuple[Tensor, list[Tensor]]:
        if exact and self._planned[0].dtype != self.flat.shard.dtype:
            return self.flat.full, self.flat.views
        return self._planned

    def refit(self, exact: bool) -> None:
        """Be what it should be.

        Args:
            exact: compute in the shard's own dtype, whatever the plan says.
        """
        flat = self.flat
        if not self._fits_shard:
            flat.full = device.empty(flat.layout.padded, flat.shard.dtype, "unsharded", self.device)
            flat.views = flat.unflatten(flat.full)
            device.free(flat.full)
            self._make()
        self._use(*self._wanted(exact))


_MOVED = "An FSDP-managed module unexpectedly has parameters on {}. Make sure to move the module to {} before training"
_OFFLOADED_MOVED = (
    "An FSDP-managed module with parameter CPU offloading enabled has parameters on {}. Make sure to not move the "
    "module from CPU when offloading parameters"
)
