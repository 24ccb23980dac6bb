"""Loss scaling for fp16 whose ranks step together or not at all (torch/distributed/fsdp/sharded_grad_scaler.py).

A rank sees 1/N of the gradients, and an overflow in any part affects all ranks: if one rank steps while another skips
the step, their parameters differ from then on, and soon their scales do, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from minifsdp import comm
from minifsdp.comm import Group, Label
from minifsdp.device import asked_for
from minifsdp.optimizer_checks import check_reduced
from minifsdp.order import check_labelled_calls
from minifsdp.zero.partition import ShardedOptimizer


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` that skips a step if any rank has found an infinity or a NaN.

    Every gradient of the optimizer counts, including those of NO_SHARD units, of ignored parameters and in host memory.
    A rank without any gradient takes part, too. For a ZeRO optimizer, the gradients of the shards count; they are
    reduced here if they have not been reduced yet. Gradients may have any dtype. `unscale_`, or `step` without it, is
    collective: it adds one all-reduce of 4 bytes. It does not make the host wait in addition to the wait that `step`
    contains anyway, unless gradients are in host memory, which requires one wait for the scale.

    Args:
        device: type of the device that the loss is on. On a machine without CUDA "cuda" means "cpu" (torch's scaler
            disables itself there), but a device with an index must be there.
        init_scale: the first scale.
        backoff_factor: the factor applied to the scale after a skipped step.
        growth_factor: the factor applied to the scale after `growth_interval` consecutive steps without a skip.
        growth_interval: see `growth_factor`.
        enabled: if false, nothing is scaled and no step is skipped.
        process_group: the ranks that step together; default: all. Hybrid sharding needs all.

    Raises:
        ValueError: there is no such device here.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group | None = None,
    ) -> None:
        kind = "cpu" if device == "cuda" and not torch.cuda.is_available() else asked_for(device, "device").type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """A tensor times the scale, or every tensor of an iterable times the scale; each keeps its dtype.

        The loss of a unit with `param_dtype` has that dtype, and so does the gradient with which backward begins.
        torch's own scaler multiplies by a number in fp32, which turns a loss in fp16 into fp32.
        """
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not (self.is_enabled() and isinstance(outputs, Iterable)):
            return super().scale(outputs)
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.reduce_gradients()
            optimizer = optimizer.inner
        check_reduced(optimizer)
        anywhere = found_inf.clone()
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if any(gradient.device.type == "cpu" for gradient in gradients):
            # To the host torch's scaler would send copies without waiting, and read them before they are there.
            inv_scale, found_inf = inv_scale.cpu(), torch.zeros_like(found_inf, device="cpu")
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
        for here in found.values():
            anywhere = torch.maximum(anywhere, here.to(anywhere.device, non_blocking=True))
        group = comm.world(self.process_group)
        check_labelled_calls()
        comm.all_reduce(anywhere, group, comm.MAX, Label("whether a gradient is infinite (ShardedGradScaler)")).wait()
        return {anywhere.device: anywhere}
