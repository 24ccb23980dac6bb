"""A unit with one flat parameter, according to its plan (plan.py).

    shard (fp32, perhaps on the host) --cast, copy--> full (compute dtype) --compute--> leaf.grad
    shard.grad <--add-- <--copy-- <--cast-- mean <--reduction-- gradient (reduce dtype)

The optimizer sees only the shard, in the shard's own dtype, so that an update too small for the 8 bits of a bf16
mantissa is not lost (FSDP paper 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.comm import Done, Group, Handle
from minifsdp.contents import Contents
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.delivery import Delivery
from minifsdp.fsdp.gradient import Gradient
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp.unit import UNSHARDED, Unit
from minifsdp.fsdp.unsharded import Unsharded
from minifsdp.fsdp.view import FlatView
from minifsdp.fsdp.written import check_memory
from minifsdp.optimizer_steps import steps_taken
from minifsdp.private import identity, version_of


class FlatUnit(Unit):
    """The life of one flat parameter (torch/distributed/fsdp/_flat_param.py, `FlatParamHandle`).

    Buffers and their users, for P padded elements over N ranks:

        full [P]            from `start_gather` to `free`                  the gather writes it, compute reads it
        gradient [P]        from the first `take_gradient` to `wait_reduce`   compute writes it, the reduction reads it
        shard.grad [P / N]  from `start_reduce` until the optimizer drops it  the reduction writes it

    Each buffer is allocated on one stream and used on another, and is protected by `record_stream` in `device.free`
    (rate_limit.py describes an alternative). The optimizer drops `shard.grad` without this protection: the memory is
    reused by a later reduction, and no reduction begins before its stream has waited for the computation, including
    that of the optimizer.

    Args:
        flat: the parameters, divided into as many shards as `plan.inside` has ranks, or one.
        plan: ranks, dtypes and memory.
        name: the unit's name in plots.
        reshard_after_forward: free the unit after forward; it has no effect if the unit is not sharded.
        view: creates the tensors of the flat parameter that modules and the optimizer see.
        reduction: averages the gradients.
    """

    def __init__(
        self,
        flat: FlatParameter,
        plan: Plan,
        name: str = "unit",
        reshard_after_forward: bool = True,
        view: Callable[[FlatParameter], FlatView] = FlatView,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(name, reshard_after_forward and plan.inside is not None, plan.group)
        if plan.offload:
            flat.shard = nn.Parameter(device.copy_to_host(flat.shard.data), flat.shard.requires_grad)
            device.synchronize(flat.full.device)  # the host may read the shard as soon as the unit is made
        self.flat, self.plan, self.device = flat, plan, flat.full.device
        self.delivery = Delivery(plan, reduction or Reduction(), self.device)
        self.unsharded = Unsharded(flat, plan, self.device)
        self.gradient = Gradient(flat.layout, self.device)
        self.exact = False  # compute in the shard's own dtype
        self._gathered: list[int] = []  # the shards' versions, if the unit stays unsharded
        self.view: FlatView = view(flat)
        self.view.stays = self.unsharded.is_shard
        self.contents = Contents(flat.names, flat.layout, flat.shard, self.view, self.group, self.device)
        self._set_leaves([nn.Parameter(each, flat.shard.requires_grad) for each in self.unsharded.views])

    @property
    def group(self) -> Group:
        """The ranks that the unit's first collectives are among."""
        return self.plan.group

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The parameters' buffers: the unsharded one, used if gathered in the shard's dtype, and the shard."""
        return {"parameters": self.flat.full, "shard": self.flat.shard}

    # Parameters

    def refresh(self) -> None:
        self.view.refresh()
        if not self.unsharded.fits(self.exact):  # the shard has changed, or `exact`
            self.free()
            self.unsharded.refit(self.exact)
            self.view.stays = self.unsharded.is_shard
            for leaf, each in zip(self.leaves, self.unsharded.views, strict=True):
                leaf.data = each
        check_memory(self.title, self.contents.names, self.leaves, self.unsharded.views)
        super().refresh()

    @property
    def _version(self) -> list[int]:
        return [steps_taken(), *map(version_of, self.shards)]

    @property
    def is_stale(self) -> bool:
        return not self.unsharded.is_shard and self._gathered != self._version

    def _gather(self) -> Any:
        if not (self.freed_after_forward and self.freed_after_backward):
            self._gathered = self._version
        if self.unsharded.is_shard:
            return Done()
        self.unsharded.allocate()
        return self.gather_into(self.unsharded.target)

    def gather_into(self, full: Tensor) -> Any:
        """Fill `full` [P] with the values of all shards, in its own dtype; returns what to wait for.

        A shard that has another dtype, or lies on the host, is copied straight to its place, and the gather works in
        place: no buffer for a cast shard (torch has one, `_mp_shard`), none for its copy on the device.
        """
        part, inside = self.flat.shard.data, self.plan.inside
        if inside is None or self.plan.offload or part.dtype != full.dtype:
            part = self.flat.mine(full).copy_(part, non_blocking=True)
        if self.plan.offload:
            self.delivery.copies.note_sent()
        if inside is None:  # the copy is waited for as a collective would be
            return device.current_stream(self.device).record_event()
        return comm.all_gather(full, part, inside, self.label)

    def _release(self) -> None:
        self.unsharded.free()

    def release_shards(self) -> None:
        self.delivery.copies.wait_sent()

    @contextmanager
    def gathered(self) -> Iterator[Tensor]:
        """All values as one buffer [P] in the shard's dtype, gathered now: what a forward has left may be older."""
        self.refresh()
        was_unsharded = self.state is UNSHARDED
        self.free()
        full = self.flat.shard.data
        if self.plan.inside is not None:
            full = self.flat.full
            device.allocate(full)
            self.gather_into(full.data).wait()
        try:
            yield full
        finally:
            if full is self.flat.full:
                device.free(full)
            if was_unsharded:
                self.start_gather()
                self.wait_gather()

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if self.state is not UNSHARDED:  # backward gathers again, and sees the values that forward has seen
            return
        own = identity(self.unsharded.full.untyped_storage())
        for index, leaf in enumerate(self.leaves):
            if identity(leaf.untyped_storage()) != own or self.view.is_changed(index):
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward where they stay whole "
                    f"in between: {self.contents.names[index]} of {self.title} has new values. Set them after backward."
                )

    # Gradients: collected, reduced, delivered

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of the reduction."""
        return (not self.exact and (self.plan.reduce or self.plan.compute)) or self.flat.shard.dtype

    @property
    def collected_in(self) -> torch.dtype:
        """The dtype in which a gradient is collected that this backward begins.

        Inside no_sync many are added, and a dtype that will do for their mean may not do for the sum: then it is the
        leaves' dtype, if that has more bytes, and the sum is cast before the reduction.
        """
        computed, reduced = self.unsharded.full.dtype, self.gradient_dtype
        return computed if not self.reduces and computed.itemsize > reduced.itemsize else reduced

    @property
    def has_gradient(self) -> bool:
        return self.gradient.full is not None

    def show_accumulated(self) -> None:
        self.view.show_accumulated(self.gradient)

    def take_gradient(self, index: int) -> None:
        leaf = self.leaves[index]
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:  # a function's backward has withheld it
            return
        if self.gradient.full is None:
            self.gradient.begin(self.collected_in)
        self.gradient.add(index, gradient)

    def drop_gradient(self) -> None:
        self.gradient.drop()

    def _reduce(self) -> Handle:
        self._reduced = self.gradient.complete(self.gradient_dtype)
        self._mean, handle = self.delivery.start(self._reduced, self.label)
        return handle

    def _accumulate(self) -> None:
        mean = self._mean
        self.gradient.release(mean is self._reduced)
        del self._reduced, self._mean
        self.delivery.take(mean, self.label, [mean] if self.gradient.was_empty else [], self._receive)

    def finish_reduce(self) -> None:
        self.delivery.finish()

    def _receive(self, mean: Tensor, without_gradient: list[bool]) -> None:
        if any(without_gradient):
            device.free(mean)
        else:
            self._deliver(mean)

    def _deliver(self, mean: Tensor) -> None:
        """Give a mean [P / N] to the shard's gradient, with its memory."""
        if self.plan.keep_low:
            for shard in self.shards:
                shard.grad_dtype = None  # torch: a gradient may have another dtype
        self.delivery.send(mean, None if self.plan.keep_low else self.flat.shard.dtype, self.view.add)
