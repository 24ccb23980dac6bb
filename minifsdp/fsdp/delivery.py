"""The way of a mean gradient to the shards' `.grad`.

    gradient [P] --reduce-scatter inside--> [P / N] --all-reduce across--> mean --cast--> --to the host--> shard.grad
                 start                      take                           send                            add

Each unit has one such object. Only the unit knows the parameters: it says of which parts of a mean it is `unsure`, and
it adds the mean to the parameters' `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from minifsdp.comm import Handle, Label
from minifsdp.fsdp.offload import HostCopies
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction, in_dtype

R = TypeVar("R", bound=Reduction)
Add = Callable[[Tensor], None]
Deliver = Callable[[Tensor, list[bool]], None]


class Delivery(Generic[R]):
    """The means of one unit that are on their way: one at a time across the replicas, any number to the host.

    Args:
        plan: ranks, dtypes and memory.
        reduction: averages gradients.
        on: device of the gradients.

    Attributes:
        copies: the copies between host and device that are in progress.
        all_reduces: means inside are reduced over the replicas; otherwise they are kept, and later ones are added.
        partial: the mean inside [P / N] that was kept.
    """

    def __init__(self, plan: Plan, reduction: R, on: torch.device) -> None:
        self.plan, self.reduction, self.copies = plan, reduction, HostCopies(on, plan.pin)
        self.all_reduces = True
        self.partial: Tensor | None = None
        self._across: tuple[Handle, Tensor, Sequence[Tensor], Deliver] | None = None

    def start(self, gradient: Tensor, label: Label) -> tuple[Tensor, Handle]:
        """Start to reduce `gradient` [P] inside; returns the mean, to be taken after the wait for the handle."""
        return self.reduction.start(gradient, self.plan, label)

    def take(self, mean: Tensor, label: Label, unsure: Sequence[Tensor], deliver: Deliver) -> None:
        """Deliver a mean inside, or start its all-reduce across the replicas, which overlaps the next reductions.

        Args:
            mean: [P / N], whose memory is given away.
            label: the subject of the all-reduce.
            unsure: the parts of `mean` for which this rank had no gradient.
            deliver: called with the mean of all ranks and, for each part in `unsure`, whether no rank had a gradient.
        """
        if self.partial is not None:
            mean.add_(self.partial)
            self.partial = None
        if not self.all_reduces and self.plan.is_hybrid:
            self.partial = mean
            return
        handle = self.reduction.start_across(mean, self.plan, label)
        if handle is None:
            self._receive(mean, unsure, deliver)
        else:
            self._across = handle, mean, unsure, deliver

    def _receive(self, mean: Tensor, unsure: Sequence[Tensor], deliver: Deliver) -> None:
        without_gradient = no_rank_has_gradient(unsure) if unsure else []
        self.reduction.finish(mean, self.plan)
        deliver(mean, without_gradient)

    def send(self, mean: Tensor, dtype: torch.dtype | None, add: Add) -> None:
        """Pass a mean of all ranks to `add` in `dtype`, or as it is: at once, or if shards are on the host, there."""
        if dtype is not None:
            mean = in_dtype(mean, dtype)
        if self.plan.offload:
            self.copies.send(mean, add)
        else:
            add(mean)

    def finish(self) -> None:
        """Wait for what is on its way; after this every mean has been added."""
        if self._across is not None:
            (handle, mean, unsure, deliver), self._across = self._across, None
            handle.wait()
            self._receive(mean, unsure, deliver)
        self.copies.receive()


# A rank whose data has not reached a parameter still takes part in its reduction. It sends -0.0, the sum over nothing:
# x + -0.0 is x for every x, 0.0 too, and -0.0 + -0.0 is -0.0. So if nothing but -0.0 comes back, no rank had a
# gradient, and `.grad` stays as it was, as in one process.


def no_rank_has_gradient(parts: Sequence[Tensor]) -> list[bool]:
    """For each of these parts of a sum over the ranks; on CUDA the host waits for the answer."""
    return torch.stack([(part.eq(0) & part.signbit()).all() for part in parts]).tolist()
