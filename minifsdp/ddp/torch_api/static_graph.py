"""A graph that is the same in every iteration: recorded in the first and assumed from then on (static_graph).

torch's reducer does the same (torch/csrc/distributed/c10d/reducer.cpp, `delay_all_reduce` and `rebuild_buckets`). The
first iteration provides information that a reducer cannot have in advance. For example, a layer that is checkpointed
several times gets several gradients in one backward, and the sum is complete only with the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.ddp.reducer import Reducer


class StaticGraphReducer(Reducer):
    """A reducer that reduces only after its first backward has ended, and plans the later ones accordingly.

    Each rank finds out by itself how many gradients each parameter gets in a backward. The sum in the bucket is
    complete when the last of them has arrived. A parameter that gets no gradient takes part as in
    `UnusedFindingReducer`, but without a walk through the graph.

    Together, the ranks find out how many ranks use each parameter, and in which order the gradients are completed. This
    takes one all-reduce of two numbers per parameter, in an int64 "communication" buffer that exists only at the end of
    the first backward, where the host waits for it. Before the second forward, the buckets are built again in that
    order, without the parameters that no rank uses.
    """

    blame = (
        "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then "
        "got unused in the second iteration. this is not compatible with static_graph set to True."
    )
    cure = "Pass find_unused_parameters=True to DistributedDataParallel instead."

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.name_of = self.names
        self.arrived: dict[nn.Parameter, int] = {}  # gradients in this backward, in the order of the last of each
        self.expected: dict[nn.Parameter, int] | None = None  # what `arrived` was at the end of the first
        self.order: list[nn.Parameter] | None = None  # in which the ranks complete the gradients of those they use
        self.rebuilt = False

    def before_forward(self) -> None:
        if self.arrived and self.expected is None:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one: the first "
                "backward raised an error. Wrap the module again to go on."
            )
        super().before_forward()
        if self.order is not None and not self.rebuilt:
            self.names = {p: self.names[p] for p in self.order}
            self.build_buckets(reversed(self.order))
            self.rebuilt = True

    def begin(self) -> None:
        super().begin()
        if self.expected is not None:
            self.mark_all_ready_but(self.expected)

    def end(self) -> None:
        if self.begun and self.expected is None:
            self.expected = dict(self.arrived)
            self.mark_all_ready_but(())
        super().end()

    def on_gradient(self, param: nn.Parameter, incoming: Tensor | None) -> None:
        if param not in self.bucket_of and param.grad is None:
            return  # reached by backward on every rank, and given nothing by any
        if param not in self.bucket_of or (self.expecting and param in self.ready and self.expected is not None):
            raise RuntimeError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True. "
                f"It is parameter {self.name_of[param]}. {self.cure}"
            )
        super().on_gradient(param, incoming)

    def is_complete(self, param: nn.Parameter) -> bool:
        self.arrived[param] = self.arrived.pop(param, 0) + 1
        return self.expected is not None and self.arrived[param] == self.expected[param]

    def finish(self) -> None:
        super().finish()
        self.arrived.clear()

    def unused_on_all_ranks(self) -> set[nn.Parameter]:
        if self.order is not None:
            return set()  # they are in no bucket
        place = {p: number for number, p in enumerate(self.arrived)}
        mine = torch.tensor([[p in self.used for p in self.names], [place.get(p, 0) for p in self.names]])
        sums = device.empty(mine.numel(), torch.int64, "communication", next(iter(self.names)).device)
        comm.all_reduce(sums.copy_(mine.view(-1)), self.group).wait()
        users, places = sums.view(2, -1).tolist()
        device.free(sums)
        # By its mean place on the ranks that use it; where ranks agree on the order, in that order.
        mean_place = {p: at / n for p, at, n in zip(self.names, places, users, strict=True) if n}
        self.order = sorted(mean_place, key=mean_place.__getitem__)
        return set(self.names) - set(self.order)
