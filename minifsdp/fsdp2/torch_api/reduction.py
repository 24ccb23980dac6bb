"""A reduction with the settings of the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group, Handle, Label
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp2.torch_api import custom


@dataclass
class ChosenReduction(Reduction):
    """The mean, or a different reduction that the user has chosen.

    Attributes:
        factor: the divisor of the sum; None: the number of ranks.
        sums: the collective only sums, and the division is done here.
        hook: called with each result [S'] after the last collective, before the rest of the division.
        stream: the stream on which the hook is called; None: the stream of the reduction.
        group: the ranks inside, with a separate communicator; None: gathers and reductions use the same one.
        custom: the user's reduce-scatter (custom.py).
    """

    factor: float | None = None
    sums: bool = False
    hook: Callable[[Tensor], Any] | None = None
    stream: Any = None
    group: Group | None = None
    custom: Any = None

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        """In fp16 part of the division comes before the sum, so that it does not overflow."""
        if self.factor is None and not self.sums:
            return super().scaling(dtype, ranks)
        divisor = ranks if self.factor is None else self.factor
        _, before, _ = super().scaling(dtype, max(1, round(divisor)))
        return comm.SUM, before, divisor / before

    def start(self, gradient: Tensor, plan: Plan, label: Label | None = None) -> tuple[Tensor, Handle]:
        return super().start(gradient, plan if self.group is None else replace(plan, inside=self.group), label)

    def reduce_scatter(self, result: Tensor, gradient: Tensor, group: Group, op: Any, label: Label | None) -> Any:
        if self.custom is not None:
            return custom.reduce_scatter(self.custom, result, gradient, group, op)
        return super().reduce_scatter(result, gradient, group, op, label)

    def finish(self, result: Tensor, plan: Plan) -> None:
        if self.hook is not None:
            here = device.current_stream(result.device)
            there = here if self.stream is None else self.stream
            there.wait_stream(here)
            with device.on_stream(there):
                self.hook(result)
            here.wait_stream(there)
        super().finish(result, plan)
