"""A unit whose parameters are sharded individually and stay in their modules (FSDP2).

Buffers and their lifetimes, for S padded elements per rank, S' of which are trainable:

    gathered [N * S]   from `start_gather` to the copy out in `wait_gather`    in rank order, of the gathers' stream
    whole [N * S]      from there to `free`                                    in parameter order, of compute's
    leaf gradients     from autograd to `start_reduce`                         as autograd has made them
    gradient [N * S']  from `start_reduce` to `wait_reduce`                    in rank order, packed
    mean [S']          from `start_reduce`; becomes the memory of the parameters' `.grad`

(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `FSDPParamGroup`.)
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.comm import Group, Handle, Label
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.offload import HostCopies
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import in_dtype
from minifsdp.fsdp.steps import steps_taken
from minifsdp.fsdp.unit import UNSHARDED, Unit
from minifsdp.fsdp.written import check_memory
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.cut import Cut
from minifsdp.fsdp2.extensions import Extended, renewed, unsharded_of
from minifsdp.fsdp2.gradients import Gradients, of_nobody
from minifsdp.fsdp2.held import Held, Recorded
from minifsdp.fsdp2.reduction import ChosenReduction
from minifsdp.fsdp2.view import InPlaceView
from minifsdp.order import check_labelled_calls, next_on
from minifsdp.private import in_backward, version_of
from minifsdp.process_groups import wants_order_checked


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

    Attributes:
        policy: the policy passed to extensions of the gather (extensions.py).
        all_gather: the user's all-gather (custom.py); None: the all-gather of comm.py.
        reduction: averages the gradients.
        all_reduces: means inside are reduced over the replicas; otherwise they are kept, and later ones are added.
        gathers_in_backward: backward reads the parameters' values.
        reduces_unused: give a parameter for which no rank has a gradient zeros instead of None.
        gathers, reductions: release buffers that another stream reads last.
    """

    view: InPlaceView
    policy: Any = None
    all_gather: Any = None

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
    ) -> None:
        super().__init__(name, reshard_after_forward)
        assert plan.inside is not None, "a unit is sharded over ranks"
        self.plan, self.group, self.device, self.cuts, self.smaller = plan, plan.inside, on, cuts, smaller
        check_labelled_calls()
        self.label = Label(name, f"unit {next_on(self.group)} of the group" if wants_order_checked() else "")
        self.inner = [dtensors.spec_of(p) for p in params]  # tensor parallelism's, if it has cut them before
        home = torch.device("cpu") if plan.offload else on
        shards = [dtensors.shard(p, cut, mesh, self.group.rank(), home) for p, cut in zip(params, cuts, strict=True)]
        self.view = InPlaceView(list(params.values()), shards, plan.pin and plan.offload and on.type == "cuda")
        self.shards, self.leaves, self.mesh = shards, [], mesh
        self._train([])
        self.gathers: Held | Recorded = Held()
        self.reductions: Held | Recorded = Held()
        self.reduction, self.copies, self.gradients = ChosenReduction(), HostCopies(on, plan.pin), Gradients(cuts, on)
        self.all_reduces, self.reduces_unused, self.gathers_in_backward = True, False, True
        self.reshard_after_backward = True  # also before another micro-batch: an optimizer may be built in between
        self._gathered: list[int] = []  # the versions that were
        self._packed: Tensor | None = None
        self._across: Handle | None = None
        self._arriving: deque[list[int]] = deque()

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
        self.unsharded = unsharded_of(self, dtypes)
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
        if self.state is UNSHARDED and self.freed_after_forward:
            self.unsharded.keep()

    def start_gather(self) -> None:
        if self.gathers_in_backward or not in_backward():
            super().start_gather()

    def _gather(self) -> Any:
        self._gathered = self._versions
        handle = self.unsharded.start(self.view.parts, self.gathers, self.all_gather, self.label)
        if self.plan.offload:
            self.copies.note_sent()
        return handle

    def _arrived(self) -> None:
        self.unsharded.arrive()
        if isinstance(self.unsharded, Extended) and self.unsharded.renew(self.leaves):
            self.view.attach(self)

    def _release(self) -> None:
        self.unsharded.free()

    def release_shards(self) -> None:
        self.copies.wait_sent()

    # Gradients: held, packed, reduced, delivered

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.plan.reduce or self.plan.compute or self.shards[self.trained[0]].dtype

    @property
    def has_gradient(self) -> bool:
        return bool(self.gradients.held) or self._packed is not None

    def show_accumulated(self) -> None:
        self.view.show_accumulated(self.trained, self._drop)

    def _drop(self, index: int) -> None:
        self.gradients.held.pop(index, None)
        if self.partial is not None and index in self.trained:
            self._rows.local(self.partial, self.group.rank())[self.trained.index(index)].zero_()

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
            self.reductions.give_back(self.device)
            ranks, dtype = self.group.size(), self.gradient_dtype
            self._packed, self._rows, self._absent = self.gradients.pack(self.trained, ranks, dtype)

    def _reduce(self) -> Handle:
        self.pack_gradient()
        assert self._packed is not None
        self._mean, handle = self.reduction.start(self._packed, self.plan, self.label)
        return handle

    def _accumulate(self) -> None:
        assert self._packed is not None
        self.reductions.keep(self._packed)
        self._packed = None
        if self.plan.across is None:
            self._receive()
            return
        if self.partial is not None:
            self._mean.add_(self.partial)
            self.partial = None
        if self.all_reduces:
            self._across = self.reduction.start_across(self._mean, self.plan, self.label)
        else:
            self.partial = self._mean

    def finish_reduce(self) -> None:
        if self._across is not None:
            self._across.wait()
            self._across = None
            self._receive()
        self.copies.receive(self._deliver)
        self.gathers.clear()
        self.reductions.clear()

    def _receive(self) -> None:
        """Take a mean apart; only a rank that has contributed nothing to a parameter has to look."""
        mean, delivered = self._mean, self.trained
        del self._mean
        if self._absent and not self.reduces_unused:
            columns = [self.trained.index(index) for index in self._absent]
            nobody = {i for i, none in zip(self._absent, of_nobody(mean, self._rows, columns), strict=True) if none}
            delivered = [index for index in delivered if index not in nobody]
        self.reduction.finish(mean, self.plan)
        mean = in_dtype(mean, self.shards[self.trained[0]].dtype)
        self._arriving.append(delivered)
        if self.plan.offload:
            self.copies.send(mean)
        else:
            self._deliver(mean)

    def _deliver(self, mean: Tensor) -> None:
        """Give each parameter its piece of a mean [S'], with its memory."""
        delivered = set(self._arriving.popleft())
        pieces = zip(self.trained, self._rows.local(mean, self.group.rank()), strict=True)
        self.view.add([(index, piece) for index, piece in pieces if index in delivered])
