"""A reduction whose divisor the user has chosen."""

from __future__ import annotations

from typing import Any

import torch

from minifsdp import comm
from minifsdp.fsdp.reduction import Reduction


class DividedReduction(Reduction):
    """Divides the sum over all ranks by `factor`.

    Args:
        factor: the divisor.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        """In fp16 part of the division comes before the sum, so that it does not overflow."""
        _, before, _ = super().scaling(dtype, max(1, round(self.factor)))
        return comm.SUM, before, self.factor / before
