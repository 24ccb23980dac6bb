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
from minifsdp.fsdp.staged import StagedUnit
from minifsdp.fsdp.torch_api.materialize import own_buffers
from minifsdp.fsdp.torch_api.options import MixedPrecision
from minifsdp.tree import map_tensors, tensors_in

BufferDtypes = dict[tuple[nn.Module, str], torch.dtype]
"""What buffers had before they were cast, by their module and attribute."""


class MixedPrecisionUnit(StagedUnit):
    """A unit that computes in `precision.param_dtype` and reduces in `precision.reduce_dtype`.

    Args:
        precision: the dtypes.
        module: the wrapped module. With `FSDP_USE_FULL_PREC_IN_EVAL=1` in the environment it computes in the shards'
            dtype while it is in eval mode.
    """

    def __init__(self, *args: Any, precision: MixedPrecision, module: nn.Module, **kwargs: Any) -> None:
        self.precision, self.module = precision, module
        self.exact = False  # all is in the shards' dtype at present
        self._adds_up = False  # the backward under way is one of several before the reduction
        super().__init__(*args, **kwargs)

    def _make_full(self) -> tuple[Tensor, list[Tensor]]:
        dtype = self.precision.param_dtype or self.flat.shard.dtype
        if dtype == self.flat.shard.dtype:
            self.low = super()._make_full()
        else:
            full = device.empty(self.flat.numel + self.flat.padding, dtype, "unsharded", self.device)
            self.low = full, self.flat.unflatten(full)  # views can be made of memory that is there
            device.free(full)
        return self.low

    def follow(self) -> None:
        super().follow()
        self.exact = computes_exactly(self.module)
        differs = self.low[0].dtype != self.flat.shard.dtype
        full, views = (self.flat.full, self.flat.views) if self.exact and differs else self.low
        if full is not self.full:
            self.free()
            self.full, self._target = full, full.data
            for leaf, view in zip(self.leaves, views, strict=True):
                leaf.data = view

    @property
    def gradient_dtype(self) -> torch.dtype:
        if self.exact:
            return self.flat.shard.dtype
        return self.precision.reduce_dtype or self.precision.param_dtype or self.flat.shard.dtype

    # In fp16 a sum over ranks overflows at 65,504, and a gradient divided by N first underflows: divide by about
    # sqrt(N) before, and by the rest after (torch/distributed/algorithms/_comm_hooks/default_hooks.py). Across replicas
    # too: of a hybrid unit N is the number of all ranks.

    @property
    def reduction(self) -> Any:
        return comm.SUM if self.gradient_dtype is torch.float16 else comm.MEAN

    # Inside no_sync many gradients are added, and a dtype that will do for their mean may not do for the sum: they are
    # collected in the leaves' dtype if that has more bytes, and cast before the reduction.

    def take_accumulated(self, more: bool = False) -> None:
        self._adds_up = more
        super().take_accumulated(more)

    @property
    def collected_in(self) -> torch.dtype:
        whole, reduced = self.full.dtype, self.gradient_dtype
        return whole if self._adds_up and whole.itemsize > reduced.itemsize else reduced

    def _complete_gradient(self) -> Tensor:
        gradient = super()._complete_gradient()
        if gradient.dtype != self.gradient_dtype:
            low = device.empty(gradient.numel(), self.gradient_dtype, "gradients", self.device)
            self._reduced, self._reduced_views = low.copy_(gradient), self.flat.unflatten(low)
            device.free(gradient)
            gradient = low
        return gradient.div_(self._divide_before) if self.reduction is comm.SUM else gradient

    @property
    def _divide_before(self) -> int:
        return int(2 ** math.ceil(math.log2(self.averaged_over) / 2))

    def _deliver(self, gradient: Tensor) -> None:
        if self.reduction is comm.SUM:
            gradient.div_(self.averaged_over / self._divide_before)
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

    The host waits for copies from its memory, as in torch: the caller may write the next batch there.
    """

    def wanted(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=to, dtype=wanted(tensor))

    fit = all(t.device == to and t.dtype == wanted(t) for t in tensors_in(inputs))
    return inputs if fit else map_tensors(move, inputs)


def follow_buffers(before: BufferDtypes, dtype: torch.dtype | None, exact: bool) -> None:
    """Give buffers that were cast the dtypes that they had before, if all is to be exact, or `dtype` again."""
    for (module, name), original in before.items():
        module._buffers[name] = module._buffers[name].to(original if exact else dtype)  # type: ignore[union-attr]


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> BufferDtypes:
    """Give the modules' own floating-point buffers `dtype`; returns those that they had, for their state dict."""
    before: BufferDtypes = {}
    for module, name, buffer in own_buffers(modules) if dtype is not None else ():
        if buffer.is_floating_point():
            before[module, name] = buffer.dtype
            module._buffers[name] = buffer.to(dtype)
    return before
