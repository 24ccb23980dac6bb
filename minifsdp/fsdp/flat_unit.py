"""A unit with one flat parameter, sharded over a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Done, Group, Handle
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.unit import Unit, add_gradient


class FlatUnit(Unit):
    """One flat parameter's life (torch/distributed/fsdp/_flat_param.py, `FlatParamHandle`).

    Buffers and who holds them, P padded elements over N ranks:

        full [P]            from `start_gather` to `free`                  the gather writes it, compute reads it
        gradient [P]        from the first `take_gradient` to `wait_reduce`   compute writes it, the reduction reads it
        shard.grad [P / N]  from `start_reduce` until the optimizer drops it  the reduction writes it

    Each is allocated on one stream and used on another; what protects it is `record_stream` in `device.free` (what else
    would serve: rate_limit.py). The optimizer drops `shard.grad` without: its memory goes to a later reduction, and no
    reduction begins before its stream has waited for the computation, the optimizer's included.
    """

    reduction: Any = comm.MEAN

    def __init__(
        self, flat: FlatParameter, group: Group, name: str = "unit", reshard_after_forward: bool = True
    ) -> None:
        super().__init__(name, reshard_after_forward)
        self.group = group
        self.flat = flat
        self.shards = [flat.shard]
        self.device = flat.full.device
        self.full, views = self._make_full()
        # An alias with a version counter of its own: to gather is not to modify what autograd has saved.
        self._target = self.full.data
        self._spare: tuple[Tensor, list[Tensor]] | None = None  # a freed gradient and its views, to be used again
        self._new_gradient()
        self._adopt([nn.Parameter(view, flat.shard.requires_grad) for view in views], flat.places)

    def _make_full(self) -> tuple[Tensor, list[Tensor]]:
        """The buffer [P] that the gather fills, and the parameters as views of it."""
        return self.flat.full, self.flat.views

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which gradients are reduced."""
        return self.flat.shard.dtype

    @property
    def collected_in(self) -> torch.dtype:
        """In which dtype a gradient is collected that this backward begins."""
        return self.gradient_dtype

    @property
    def averaged_over(self) -> int:
        """How many ranks' gradients a mean is made of."""
        return self.group.size()

    def follow(self) -> None:
        trained = self.flat.shard.requires_grad
        if self.leaves[0].requires_grad is not trained:
            self._train([trained] * len(self.leaves))

    def _new_gradient(self) -> None:
        self._gradient: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing = set(range(len(self.flat.views)))

    def _allocate_gradient(self) -> Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare[0].dtype == self.collected_in:
            self._gradient, self._views = spare
            device.allocate(self._gradient)
        else:
            size = self.flat.numel + self.flat.padding
            self._gradient = device.empty(size, self.collected_in, "gradients", self.device)
            self._views = self.flat.unflatten(self._gradient)
        return self._gradient

    @property
    def has_gradient(self) -> bool:
        return self._gradient is not None

    def take_gradient(self, index: int) -> None:
        if self._gradient is None:
            self._allocate_gradient()
        leaf = self.leaves[index]
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if index in self._missing:
            self._missing.remove(index)
            self._views[index].copy_(gradient)
        else:  # a backward inside no_sync came before
            self._views[index].add_(gradient)

    def _gather(self) -> Handle | Done:
        device.allocate(self.full)
        return self.gather_into(self._target)

    def gather_into(self, full: Tensor) -> Handle | Done:
        """Fill `full` [P] with the values of all shards, in its own dtype."""
        return comm.all_gather(full, self._outgoing(full), self.group)

    def _outgoing(self, full: Tensor) -> Tensor:
        """What this rank sends to those who gather."""
        return self.flat.shard.data

    def mine(self, full: Tensor) -> Tensor:
        """This rank's part [P / N] of a buffer [P] of the flat parameter's layout."""
        size = self.flat.shard.numel()
        return full[self.group.rank() * size :][:size]

    def _release(self) -> None:
        device.free(self.full)

    # A rank whose data has not reached the unit takes part in its reduction all the same. It sends -0.0, the sum over
    # nothing: x + -0.0 is x for every x, 0.0 too, and -0.0 + -0.0 is -0.0. So if nothing but -0.0 comes back, no rank
    # had a gradient, and `.grad` stays as it was, as in one process.

    def _reduce(self) -> Handle:
        gradient = self._complete_gradient()
        self._mean = device.empty(self.flat.shard.numel(), gradient.dtype, "gradients", self.device)
        return comm.reduce_scatter(self._mean, gradient, self.group, self.reduction)

    def _complete_gradient(self) -> Tensor:
        self._is_absent = self._gradient is None
        if self._gradient is None:
            self._allocate_gradient().fill_(-0.0)
        else:
            for index in self._missing:
                self._views[index].zero_()
            self.flat.clear_padding(self._gradient)
        assert self._gradient is not None
        self._reduced, self._reduced_views = self._gradient, self._views
        self._new_gradient()
        return self._reduced

    def _accumulate(self) -> None:
        self._free_gradient()
        self._receive(self._mean)
        del self._mean

    def _receive(self, mean: Tensor) -> None:
        """Deliver a mean if there is one; only a rank that has contributed nothing has to look, and on CUDA to wait."""
        if self._is_absent and bool((mean.eq(0) & mean.signbit()).all()):
            device.free(mean)
        else:
            self._deliver(mean)

    def _free_gradient(self) -> None:
        device.free(self._reduced)
        self._spare = self._reduced, self._reduced_views

    def _deliver(self, gradient: Tensor) -> None:
        """Add a mean gradient [P / N] to the shard's; its memory is given away."""
        add_gradient(self.flat.shard, gradient)
