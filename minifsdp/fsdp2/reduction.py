"""A reduction as the user has set it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction


@dataclass
class ChosenReduction(Reduction):
    """The mean, or what the user wants instead.

    Attributes:
        factor: the divisor of the sum; None: the number of ranks.
        sums: the collective adds up, and the division is ours.
        hook: called with each result [S'] after the last collective, before the rest of the division.
        stream: where the hook is called; None: where the reduction is queued.
    """

    factor: float | None = None
    sums: bool = False
    hook: Callable[[Tensor], Any] | None = None
    stream: Any = None

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        """In fp16 part of the division comes before the sum, so that it does not overflow."""
        if self.factor is None and not self.sums:
            return super().scaling(dtype, ranks)
        divisor = ranks if self.factor is None else self.factor
        _, before, _ = super().scaling(dtype, max(1, round(divisor)))
        return comm.SUM, before, divisor / before

    def finish(self, result: Tensor, plan: Plan) -> None:
        if self.hook is not None:
            here = device.current_stream(result.device)
            there = here if self.stream is None else self.stream
            there.wait_stream(here)
            with device.on_stream(there):
                self.hook(result)
            here.wait_stream(there)
        super().finish(result, plan)
