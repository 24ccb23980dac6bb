"""A unit whose parameters are sharded individually and stay in their modules (FSDP2).

Buffers and their lifetimes, for S padded elements per rank, S' of which are trainable:

    gathered [N * S]   from `start_gather` to the copy out in `wait_gather`    in rank order, of the gathers' stream
    unsharded [N * S]  from there to `free`                                    in parameter order, of compute's
    leaf gradients     from autograd to `start_reduce`                         as autograd has made them
    gradient [N * S']  from `start_reduce` to `wait_reduce`                    in rank order, packed
    mean [S']          from `start_reduce`; becomes the memory of the parameters' `.grad`

(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `FSDPParamGroup`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minifsdp.comm import Group, Handle
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.delivery import Delivery
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp.unit import UNSHARDED, Unit
from minifsdp.fsdp.written import check_memory
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import AllGather
from minifsdp.fsdp2.gradients import Gradients
from minifsdp.fsdp2.held import Held, Recorded
from minifsdp.fsdp2.unsharded import Unsharded, renewed
from minifsdp.fsdp2.view import InPlaceView
from minifsdp.optimizer_steps import steps_taken
from minifsdp.private import in_backward, version_of


def unsharded_of(unit: ParamUnit, dtypes: Sequence[torch.dtype]) -> Unsharded:
    """The memory of a unit's unsharded parameters, which have these dtypes in the computation."""
    return Unsharded(unit.cuts, unit.inner, dtypes, unit.group, unit.smaller, unit.device)


MakeUnsharded: TypeAlias = "Callable[[ParamUnit, Sequence[torch.dtype]], Any]"
"""Creates the memory of a unit's unsharded parameters, which have these dtypes in the computation."""


class ParamUnit(Unit):
    """The life of one group of parameters.

    Args:
        params: the parameters to shard, with all places that use them.
        cuts: the division of each among the ranks of `plan.inside`, the last dimension of `mesh`.
        mesh: the mesh on which the sharded parameters are placed.
        plan: ranks, dtypes and memory.
        on: device of the computation.
        name: the unit's name in plots.
        reshard_after_forward: free the unit after forward.
        smaller: ranks of `plan.inside` among which backward gathers the parts kept after forward; None: all ranks.
        unsharded: creates the memory of the unsharded parameters.
        reduction: averages gradients; None: over the ranks of the plan.

    Attributes:
        all_gather: a different all-gather than that of comm.py, with the same arguments; None: that one.
        delivery: the means on their way to the parameters' `.grad`.
        gathers_in_backward: backward reads the parameters' values.
        reduces_unused: give a parameter for which no rank has a gradient zeros instead of None.
        gathers: releases the buffers of gathers, which another stream reads last.
    """

    view: InPlaceView
    all_gather: AllGather | None = None
    reshard_after_backward = True  # also before another micro-batch: an optimizer may be built in between

    def __init__(
        self,
        params: ParamPlaces,
        cuts: list[Cut],
        mesh: Any,
        plan: Plan,
        on: torch.device,
        name: str = "unit",
        reshard_after_forward: bool = True,
        smaller: Group | None = None,
        unsharded: MakeUnsharded = unsharded_of,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(name, reshard_after_forward, plan.group)
        assert plan.inside is not None, "a unit is sharded over ranks"
        self.plan, self.device, self.cuts, self.smaller = plan, on, cuts, smaller
        self.inner = [dtensors.spec_of(p) for p in params]  # tensor parallelism's, if it has cut them before
        home = torch.device("cpu") if plan.offload else on
        shards = [dtensors.shard(p, cut, mesh, self.group.rank(), home) for p, cut in zip(params, cuts, strict=True)]
        self.view = InPlaceView(list(params.values()), shards, plan.pin and plan.offload and on.type == "cuda")
        self.shards, self.leaves, self._make_unsharded = shards, [], unsharded
        self._train([])
        self.gathers: Held | Recorded = Held()
        self.gradients, self.delivery = Gradients(cuts, on), Delivery(plan, reduction or Reduction(), on)
        self.reduces_unused, self.gathers_in_backward = False, True
        self._gathered: list[int] = []  # the versions that were
        self._packed: tuple[Tensor, Rows, list[int]] | None = None

    @property
    def group(self) -> Group:
        """The ranks that the parameters are sharded over."""
        return self.plan.group

    @property
    def names(self) -> list[str]:
        """The parameters' qualified names."""
        return [users[0].name for users in self.view.places]

    def refresh(self) -> None:
        """A step begins. The first makes the leaves: until then parameters may be on meta."""
        replaced = self.view.find_replaced()
        self.shards = self.view.shards
        dtypes = [(self.plan.compute if p.is_floating_point() else None) or p.dtype for p in self.view.parts]
        if not self.leaves or self.unsharded.dtypes != dtypes:
            self.free()
            self._make_leaves(dtypes)
            replaced = True
        if replaced:
            self.view.attach(self)
        self.unsharded.forget()
        super().refresh()
        names = self.names
        self.gradients.check_trained(self.trained, names)
        self.view.check_dtypes(self.trained, self.title)
        check_memory(self.title, names, self.leaves, self.unsharded.views)

    @torch.inference_mode(False)
    def _make_leaves(self, dtypes: list[torch.dtype]) -> None:
        self.view.check_materialized(self.title)
        self.unsharded = self._make_unsharded(self, dtypes)
        leaves = [nn.Parameter(view, False) for view in self.unsharded.views]
        self.leaves = [renewed(*pair) for pair in zip(self.leaves, leaves, strict=True)] if self.leaves else leaves

    @property
    def _versions(self) -> list[int]:
        return [steps_taken(), *map(version_of, self.view.parts), *map(version_of, self.shards)]

    @property
    def is_stale(self) -> bool:
        return self._gathered != self._versions

    def keep(self) -> None:
        """Forward is over: backward may gather what is kept here of it."""
        if self.state is UNSHARDED and self.freed_after_forward and self.smaller is not None:
            self.unsharded.keep()

    def start_gather(self) -> None:
        if self.gathers_in_backward or not in_backward():
            super().start_gather()

    def _gather(self) -> Any:
        self._gathered = self._versions
        handle = self.unsharded.start(self.view.parts, self.gathers, self.all_gather, self.label)
        if self.plan.offload:
            self.delivery.copies.note_sent()
        return handle

    def _arrived(self) -> None:
        if self.unsharded.arrive(self.leaves):
            self.view.attach(self)

    def _release(self) -> None:
        self.unsharded.free()

    def release_shards(self) -> None:
        self.delivery.copies.wait_sent()

    # Gradients: held, packed, reduced, delivered

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.plan.reduce or self.plan.compute or self.shards[self.trained[0]].dtype

    @property
    def has_gradient(self) -> bool:
        return bool(self.gradients.held) or self._packed is not None

    def show_gradients(self, accumulated: bool) -> None:
        super().show_gradients(accumulated or self.delivery.partial is not None)

    def show_accumulated(self) -> None:
        self.view.show_accumulated(self.trained, self._drop)

    def _drop(self, index: int) -> None:
        self.gradients.held.pop(index, None)
        if self.delivery.partial is not None and index in self.trained:
            rows = self.gradients.layout_of(self.trained, self.group.size(), self.delivery.partial.dtype)
            rows.local(self.delivery.partial, self.group.rank())[self.trained.index(index)].zero_()

    def drop_gradient(self) -> None:
        self.gradients.held.clear()

    def take_gradient(self, index: int) -> None:
        leaf = self.leaves[index]
        gradient, leaf.grad = leaf.grad, None
        if gradient is None or not self.shards[index].requires_grad:  # withheld by a function; frozen since forward
            return
        dtype = self.gradient_dtype  # of every sum: of tensor-parallel ranks, of micro-batches, and of the reduction
        local = dtensors.as_placed(gradient, self.inner[index], dtype, self.label)
        self.gradients.add(index, local, dtype if not self.reduces or index in self.gradients.held else local.dtype)

    def pack_gradient(self) -> None:
        if self._packed is None:
            self.gradients.keeper.give_back(self.device)
            self._packed = self.gradients.pack(self.trained, self.group.size(), self.gradient_dtype)

    def _reduce(self) -> Handle:
        self.pack_gradient()
        assert self._packed is not None
        self._mean, handle = self.delivery.start(self._packed[0], self.label)
        return handle

    def _accumulate(self) -> None:
        assert self._packed is not None
        (packed, rows, absent), self._packed = self._packed, None
        self.gradients.keeper.keep(packed)
        mean, trained = self._mean, self.trained
        del self._mean
        unsure = [] if self.reduces_unused else absent
        parts = rows.parts(mean) if unsure else []
        deliver = partial(self._deliver, rows, trained, unsure)
        self.delivery.take(mean, self.label, [parts[trained.index(each)] for each in unsure], deliver)

    def finish_reduce(self) -> None:
        self.delivery.finish()
        self.gathers.clear()
        self.gradients.keeper.clear()

    def _deliver(
        self, rows: Rows, trained: list[int], unsure: list[int], mean: Tensor, without_gradient: list[bool]
    ) -> None:
        """Give each parameter for which any rank had a gradient its piece of a mean [S'], with its memory."""
        without = {index for index, each in zip(unsure, without_gradient, strict=True) if each}
        dtype, rank = self.shards[trained[0]].dtype, self.group.rank()

        def add(mean: Tensor) -> None:
            pieces = zip(trained, rows.local(mean, rank), strict=True)
            self.view.add([(index, piece) for index, piece in pieces if index not in without])

        self.delivery.send(mean, dtype, add)
