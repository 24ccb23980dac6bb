"""The mean of all ranks' gradients, distributed over the ranks according to a plan.

    gradient [P] --reduce-scatter inside--> [P / N] --all-reduce across--> mean [P / N]

Without `across` there is only the first step. Without `inside` there is only the second, on the gradient itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group, Handle, Label
from minifsdp.fsdp.plan import Plan


class Reduction:
    """Sums gradients over the ranks of a plan and divides by their number; keeps nothing between calls."""

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        """The reduction's operator, and what to divide gradients by before it and the result after it.

        In fp16 a sum over ranks overflows at 65,504, and a gradient divided by N first underflows: divide by about
        sqrt(N) before, and by the rest after (torch/distributed/algorithms/_comm_hooks/default_hooks.py).
        """
        if dtype is not torch.float16:
            return comm.MEAN, 1, 1
        before = 2 ** math.ceil(math.log2(ranks) / 2)
        return comm.SUM, before, ranks / before

    def start(self, gradient: Tensor, plan: Plan, label: Label | None = None) -> tuple[Tensor, Handle]:
        """Reduce `gradient` [P] over the ranks inside, or across if there are none.

        Returns:
            the result, [P / N] or `gradient` itself, and the handle to wait for. `gradient` is free after the wait.
        """
        op, before, _ = self.scaling(gradient.dtype, plan.averaged_over)
        if before != 1:
            gradient.div_(before)
        if plan.inside is None:
            assert plan.across is not None
            return gradient, comm.all_reduce(gradient, plan.across, op, label)
        size = gradient.numel() // plan.inside.size()
        result = device.empty(size, gradient.dtype, "gradients", gradient.device)
        return result, self.reduce_scatter(result, gradient, plan.inside, op, label)

    def reduce_scatter(self, result: Tensor, gradient: Tensor, group: Group, op: Any, label: Label | None) -> Any:
        """Start the collective; returns what to wait for."""
        return comm.reduce_scatter(result, gradient, group, op, label)

    def start_across(self, result: Tensor, plan: Plan, label: Label | None = None) -> Handle | None:
        """Reduce the result of `start` [P / N] over the replicas, in place; None if there are none."""
        if not plan.is_hybrid:
            return None
        assert plan.across is not None
        op, *_ = self.scaling(result.dtype, plan.averaged_over)
        return comm.all_reduce(result, plan.across, op, label)

    def finish(self, result: Tensor, plan: Plan) -> None:
        """The division that is left."""
        *_, after = self.scaling(result.dtype, plan.averaged_over)
        if after != 1:
            result.div_(after)


def in_dtype(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean gradient in the dtype of the shards; another one is freed."""
    if mean.dtype == dtype:
        return mean
    cast = device.empty(mean.numel(), dtype, "gradients", mean.device).copy_(mean)
    device.free(mean)
    return cast
