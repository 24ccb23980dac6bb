"""Mixed precision: gathered in one dtype, reduced in another, kept and updated in a third (FSDP paper 4.4).

    shard (fp32) --cast--> full (param_dtype) --compute--> leaf.grad (param_dtype)
    shard.grad (fp32) <--cast-- mean (reduce_dtype) <--reduce-scatter-- gradient (reduce_dtype)

The optimizer sees fp32 only, so that an update too small for 8 bits of mantissa is not lost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.fsdp.options import MixedPrecision
from minifsdp.fsdp.staged import StagedUnit
from minifsdp.fsdp.tree import map_tensors, tensors


class MixedPrecisionUnit(StagedUnit):
    """A unit that computes in `precision.param_dtype` and reduces in `precision.reduce_dtype`.

    Args:
        precision: the dtypes.
        module: the wrapped module. With `FSDP_USE_FULL_PREC_IN_EVAL=1` in the environment it computes in the shards'
            dtype while it is in eval mode.
    """

    def __init__(self, *args: Any, precision: MixedPrecision, module: nn.Module, **kwargs: Any) -> None:
        self.precision, self.module = precision, module
        super().__init__(*args, **kwargs)

    def _make_full(self) -> tuple[Tensor, list[Tensor]]:
        size, dtype = self.flat.numel + self.flat.padding, self.precision.param_dtype or self.flat.shard.dtype
        full = device.empty(size, dtype, "unsharded", self.device)
        self.low = full, self.flat.unflatten(full)  # views can be made of memory that is there
        device.free(full)
        return self.low

    def follow(self) -> None:
        super().follow()
        full, views = (self.flat.full, self.flat.views) if computes_exactly(self.module) else self.low
        if full is not self.full:
            self.free()
            self.full, self._target = full, full.data
            for leaf, view in zip(self.leaves, views, strict=True):
                leaf.data = view

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.precision.reduce_dtype or self.precision.param_dtype or self.flat.shard.dtype

    # In fp16 a sum over ranks overflows at 65,504, and a gradient divided by N first underflows: divide by about
    # sqrt(N) before, and by the rest after (torch/distributed/algorithms/_comm_hooks/default_hooks.py).

    @property
    def reduction(self) -> Any:
        return comm.SUM if self.gradient_dtype is torch.float16 else comm.MEAN

    def _complete_gradient(self) -> Tensor:
        gradient = super()._complete_gradient()
        return gradient.div_(self._divide_before) if self.reduction is comm.SUM else gradient

    def _accumulate(self) -> None:
        if self.reduction is comm.SUM:
            self._mean.div_(self.group.size() / self._divide_before)
        super()._accumulate()

    @property
    def _divide_before(self) -> int:
        return int(2 ** round(math.log2(self.group.size()) / 2))

    def _deliver(self, gradient: Tensor) -> None:
        if self.precision.keep_low_precision_grads:
            for shard in self.shards:
                shard.grad_dtype = None  # torch: a gradient may have another dtype
        elif gradient.dtype != self.flat.shard.dtype:
            low, gradient = gradient, device.empty(gradient.numel(), self.flat.shard.dtype, "gradients", self.device)
            gradient.copy_(low)
            device.free(low)
        super()._deliver(gradient)


def computes_exactly(module: nn.Module) -> bool:
    """Whether forward is to use the shards' own dtype, whatever the precision asked for."""
    return not module.training and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def cast_inputs(inputs: Any, dtype: torch.dtype | None, to: torch.device) -> Any:
    """The arguments of a forward on device `to`, the floating-point ones in `dtype`; None: in their own.

    Non-blocking: the host does not wait for the copies.
    """

    def move(tensor: Tensor) -> Tensor:
        cast = dtype if tensor.is_floating_point() else None
        return tensor.to(device=to, dtype=cast, non_blocking=True)

    return map_tensors(move, inputs) if any(move(t) is not t for t in tensors(inputs)) else inputs


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
    """Give the modules' own floating-point buffers `dtype`; their state dict is to have the dtype they had."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and dtype is not None:
                module._buffers[name] = buffer.to(dtype)
