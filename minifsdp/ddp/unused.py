"""Parameters that a forward pass left out (find_unused_parameters)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from minifsdp import comm, device
from minifsdp.ddp.reducer import Reducer
from minifsdp.order import announce
from minifsdp.private import at_end_of_backward
from minifsdp.tree import tensors_in


class UnusedFindingReducer(Reducer):
    """A reducer whose buckets do not wait for gradients that will never be computed.

    Each rank finds the parameters that its own forward has not used. Other ranks may have used them, so these
    parameters take part with their existing `.grad` or with zero. To find the parameters that no rank has used takes
    another all-reduce of a count per parameter, in an int32 "communication" buffer that exists only in `finish`.
    """

    cure = (
        "find_unused_parameters=True looks for tensors in lists, tuples, dicts and dataclasses: let forward return "
        "its tensors in these."
    )

    reached: Set[nn.Parameter] = frozenset()  # by the forwards since the last reduction

    def prepare(self, outputs: Any) -> None:
        tensors = [t for t in tensors_in(outputs) if t.grad_fn is not None]
        earlier = self.reached if self.expecting else set()
        self.reached = earlier | parameters_behind(tensors)
        super().prepare(outputs)
        if tensors:
            register_multi_grad_hook(tensors, self.on_backward, mode="any")

    def on_backward(self, grad: Tensor) -> None:
        """The hook of the outputs: backward begins. What it cannot reach is ready now, what it did not, at its end."""
        if self.expecting:
            at_end_of_backward(lambda: self.mark_unused(set()))
            self.mark_unused(self.reached)

    def mark_unused(self, used: Set[nn.Parameter]) -> None:
        for p in self.names:
            if self.expecting and p not in used and p not in self.ready:
                self.mark_ready(p)

    def unused_on_all_ranks(self) -> set[nn.Parameter]:
        return set(self.names) - used_on_any_rank(list(self.names), self.used, self.group)


def used_on_any_rank(params: Sequence[Tensor], used: Set[Tensor], group: comm.Group) -> set[Tensor]:
    """The subset of `params` that is in `used` on at least one rank. Collective.

    It takes one all-reduce of a count per parameter, in an int32 "communication" buffer.
    """
    counts = device.empty(len(params), torch.int32, "communication", params[0].device)
    counts.copy_(torch.tensor([p in used for p in params]), non_blocking=True)
    announce("all-reduce", "which parameters have a gradient", counts, group)
    comm.all_reduce(counts, group).wait()
    found = set(params)
    if any(p not in used for p in params):  # reading the counts makes the host wait for the device: only if it must
        found = {p for p, count in zip(params, counts.tolist(), strict=True) if count}
    device.free(counts)
    return found


def parameters_behind(tensors: Iterable[Tensor]) -> set[nn.Parameter]:
    """The leaves that may receive a gradient in a backward from `tensors`, found by a walk through autograd's graph."""
    leaves = set()
    seen: set[Any] = {t.grad_fn for t in tensors}
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::AccumulateGrad":  # where the gradient of a leaf ends up
            leaves.add(node.variable)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return leaves
