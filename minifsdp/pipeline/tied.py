"""A weight in two stages, such as an embedding that is also the head: each has a copy, and their gradients are added.

Each copy collects the gradients of its own use, and the sum is the gradient of the one weight. It is formed once, at
the end of a step, in a group of the ranks concerned (Megatron-LM's embedding group). Sum and data-parallel mean may
come in either order. Here the mean is first: what FSDP2 has sharded by then is a d-th as large to send. The sum is in
fp32 or wider, and rounded once. Equal copies with equal gradients stay equal under any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.local_parts import local_gradient, local_of
from minifsdp.process_groups import destroy, part_of


class TiedWeight:
    """This rank's copies of one weight; all take the values of the first.

    Args:
        copies: the parameters, in the order of their stages.
        ranks: of all copies in the pipeline, in this order.
        group: the ranks of the pipeline.
    """

    def __init__(self, copies: Sequence[nn.Parameter], ranks: Sequence[int], group: Group) -> None:
        self.copies = copies
        self.has_first = group.rank() == ranks[0]
        self.others = part_of(group, sorted(set(ranks))) if len(set(ranks)) > 1 else None
        values = [local_of(p.detach()) for p in copies]
        if self.others is not None:
            comm.broadcast(values[0], sorted(set(ranks)).index(ranks[0]), self.others).wait()
        for each in values[1:]:
            each.copy_(values[0])

    def begin(self) -> None:
        """Before a step: leave what earlier steps have accumulated to the first copy, lest it is added twice."""
        for p in self.copies[int(self.has_first) :]:
            if p.grad is not None:
                local_of(p.grad).zero_()

    def add_gradients(self) -> None:
        """After a step: the sum of all copies' gradients for each of them; one all-reduce, in fp32 or wider.

        Raises:
            RuntimeError: a copy has no gradient.
        """
        gradients = [self._gradient(p) for p in self.copies]
        total = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        for each in gradients[1:]:
            total.add_(each)
        if self.others is not None:
            comm.all_reduce(total, self.others).wait()
        for each in gradients:
            if each is not total:
                each.copy_(total)

    def close(self) -> None:
        """Hang up: ranks that wait for this one's gradient fail."""
        if self.others is not None:
            destroy(self.others)
            self.others = None

    def _gradient(self, p: nn.Parameter) -> Tensor:
        gradient = local_gradient(p)
        if gradient is None:
            raise RuntimeError(
                f"a tied weight {list(p.shape)} has no gradient after the step: is it frozen on one rank, or does an "
                "optimizer take its gradients in backward, as ZeRO-2 does? Use ZeRO-1"
            )
        return gradient


@contextmanager
@torch.no_grad()
def added(weights: Iterable[TiedWeight]) -> Iterator[None]:
    """A step inside ends with the gradients of tied weights added."""
    for each in weights:
        each.begin()
    yield
    for each in weights:
        each.add_gradients()
