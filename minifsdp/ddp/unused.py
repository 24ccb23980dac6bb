"""Parameters that a forward pass left out (find_unused_parameters)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.ddp.graph import leaves_behind, nodes_of
from minifsdp.ddp.reducer import Reducer
from minifsdp.order import announce


class UnusedFindingReducer(Reducer):
    """A reducer whose buckets do not wait for gradients that will never be computed.

    Each rank finds the parameters that its own forward has not used. Other ranks may have used them, so these
    parameters take part with their existing `.grad` or with zero. To find the parameters that no rank has used takes
    another all-reduce of a count per parameter, in an int32 "communication" buffer that exists only in `finish`.
    """

    blame = "the last backward raised an error."
    cure = "Wrap the module again to go on."

    reached: Set[nn.Parameter] = frozenset()  # by the forwards since the last reduction

    def prepare(self, outputs: Any) -> None:
        earlier = self.reached if self.expecting else set()
        nodes = nodes_of(outputs)
        self.reached = earlier | ({leaf.variable for leaf in leaves_behind(nodes)} if nodes else set(self.names))
        super().prepare(outputs)

    def begin(self) -> None:
        super().begin()  # what it cannot reach is ready now, what it did not, at its end
        self.mark_all_ready_but(self.reached)

    def end(self) -> None:
        if self.begun:
            self.mark_all_ready_but(())
        super().end()

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
