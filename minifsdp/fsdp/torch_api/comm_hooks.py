"""Communication hooks: a user's function instead of the reduction, and two that compress gradients.

(torch/distributed/algorithms/_comm_hooks/default_hooks.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Done, Group, Label
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction

CommHook = Callable[..., None]
"""`hook(state, gradient [P], result [P / N])` fills `result`; where nothing is sharded `hook(state, gradient)` reduces
`gradient` in place. A hook may give either tensor other memory, of another dtype, by setting its `.data`."""


class HookReduction(Reduction):
    """Calls a hook, which communicates as it likes and divides as it has to.

    Args:
        state: its first argument.
        hook: see `CommHook`.
    """

    def __init__(self, state: Any, hook: CommHook) -> None:
        self.state, self.hook = state, hook

    def scaling(self, dtype: torch.dtype, ranks: int) -> tuple[Any, float, float]:
        return None, 1, 1

    def start(self, gradient: Tensor, plan: Plan, label: Label | None = None) -> tuple[Tensor, Any]:
        given = gradient.detach()  # whose `.data` may be set: the buffer is to be freed by the one who has made it
        if plan.inside is None:
            self.hook(self.state, given)
            return (gradient if given.data_ptr() == gradient.data_ptr() else given), Done()
        result = device.empty(gradient.numel() // plan.inside.size(), gradient.dtype, "gradients", gradient.device)
        filled = result.detach()
        self.hook(self.state, given, filled)
        if filled.data_ptr() == result.data_ptr():
            return result, Done()
        device.free(result)
        return filled, Done()


class DefaultState:
    """The state of the hooks below.

    Args:
        process_group: the ranks to reduce over.
    """

    def __init__(self, process_group: Group) -> None:
        if process_group is None:
            raise ValueError(f"Expected to pass in an explicit ProcessGroup to {self}.")
        self.process_group = process_group
        self.world_size = process_group.size()
        self.gradient_predivide_factor = 1.0  # about sqrt(N): neither the sum overflows then, nor the quotient vanishes
        while (
            self.world_size % self.gradient_predivide_factor == 0
            and self.world_size / self.gradient_predivide_factor > self.gradient_predivide_factor
        ):
            self.gradient_predivide_factor *= 2
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """For hooks that compress: `parameter_type` is the dtype that gradients have afterwards."""

    def __init__(self, process_group: Group, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """The mean of `grad` over the ranks, in place: for NO_SHARD."""
    grad.div_(state.gradient_predivide_factor)
    comm.all_reduce(grad, state.process_group).wait()
    grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """This rank's part of the mean of `grad` over the ranks: for sharded strategies."""
    grad.div_(state.gradient_predivide_factor)
    comm.reduce_scatter(output, grad, state.process_group).wait()
    output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Reduce in fp16, half the bytes of fp32; the result is in `state.parameter_type` again."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """The same in bf16."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    grad.data = grad.data.to(dtype)
    if output is None:
        allreduce_hook(state, grad)
        grad.data = grad.data.to(state.parameter_type)
    else:
        output.data = output.data.to(dtype)
        reduce_scatter_hook(state, grad, output)
        output.data = output.data.to(state.parameter_type)
