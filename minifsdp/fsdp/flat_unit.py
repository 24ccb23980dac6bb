"""A unit with one flat parameter, sharded over a process group."""

from __future__ import annotations

from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.unit import Unit, add_gradient


class FlatUnit(Unit):
    """One flat parameter's life (torch/distributed/fsdp/_flat_param.py, `FlatParamHandle`).

    Buffers and who holds them, P padded elements over N ranks:

        full [P]            from `start_gather` to `free`                  the gather writes it, compute reads it
        gradient [P]        from the first `take_gradient` to `wait_reduce`   compute writes it, the reduction reads it
        shard.grad [P / N]  from `start_reduce` until the optimizer drops it  the reduction writes it

    Each is allocated on one stream and used on another; what protects it is `record_stream` in `device.free`.
    """

    def __init__(
        self, flat: FlatParameter, group: Group, name: str = "unit", reshard_after_forward: bool = True
    ) -> None:
        super().__init__(name, reshard_after_forward)
        self.group = group
        self.flat = flat
        self.shards = [flat.shard]
        self.device = flat.shard.device
        # An alias with a version counter of its own: to gather is not to modify what autograd has saved.
        self._target = flat.full.data
        self._new_gradient()
        self._adopt([nn.Parameter(view, flat.shard.requires_grad) for view in flat.views], flat.places)

    def _new_gradient(self) -> None:
        self._gradient: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing = set(range(len(self.flat.views)))

    @property
    def has_gradient(self) -> bool:
        return self._gradient is not None

    def take_gradient(self, index: int) -> None:
        if self._gradient is None:
            shard, size = self.flat.shard, self.flat.numel + self.flat.padding
            self._gradient = device.empty(size, shard.dtype, "gradients", self.device)
            self._views = self.flat.unflatten(self._gradient)
        leaf = self.leaves[index]
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if index in self._missing:
            self._missing.remove(index)
            self._views[index].copy_(gradient)
        else:  # a backward inside no_sync came before
            self._views[index].add_(gradient)

    def _gather(self) -> Handle:
        device.allocate(self.flat.full)
        return comm.all_gather(self._target, self.flat.shard.data, self.group)

    def _release(self) -> None:
        device.free(self.flat.full)

    def _reduce(self) -> Handle:
        gradient = self._complete_gradient()
        self._mean = device.empty(self.flat.shard.numel(), gradient.dtype, "gradients", self.device)
        return comm.reduce_scatter(self._mean, gradient, self.group, comm.MEAN)

    def _complete_gradient(self) -> Tensor:
        assert self._gradient is not None
        for index in self._missing:
            self._views[index].zero_()
        self.flat.padding_of(self._gradient).zero_()
        self._reduced = self._gradient
        self._new_gradient()
        return self._reduced

    def _accumulate(self) -> None:
        device.free(self._reduced)
        add_gradient(self.flat.shard, self._mean)
        del self._mean, self._reduced

    def store(self) -> None:
        size = self.flat.shard.numel()
        self.flat.shard.data.copy_(self._target[self.group.rank() * size :][:size])
