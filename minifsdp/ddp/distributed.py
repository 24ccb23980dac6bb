"""Rung 3 of DDP: buckets reduced during backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._utils import _get_device_index

from minifsdp import comm
from minifsdp.ddp.reducer import Reducer
from minifsdp.ddp.sync import broadcast_from_rank_0, start_from_rank_0, trainable_parameters
from minifsdp.ddp.unused import UnusedFindingReducer


class DistributedDataParallel(nn.Module):
    """Data parallelism whose communication hides under backward (torch/nn/parallel/distributed.py).

    The last layers' gradients are there first, so their bucket is on its way while the earlier layers still compute;
    when `backward` returns, every `.grad` is the mean over the ranks. The training loop is that of one process. As in
    torch, only the first backward after a forward is reduced, and a parameter that is left out of it is an error at
    the next forward, unless `find_unused_parameters`.

    Bytes, for Ψ fp32 parameters:

    * `gradient_as_bucket_view=False`: gradients 4Ψ, and staging ("communication"): a bucket's buffer is allocated when
      the first of its gradients arrives and freed at the end of backward, when all have arrived. The peak is 8Ψ.
    * `gradient_as_bucket_view=True`: gradients 4Ψ, and no staging: the buckets ("gradients") are allocated here, live
      as long as the model, and every `.grad` that is not None is a view of one. Autograd adds a new gradient to the
      view; where `.grad` was None, a hook copies it there at once.
    * `find_unused_parameters`: 4 bytes per parameter tensor more ("communication") at the end of backward.
    * buffers: a "communication" buffer of their size at the start of a forward that broadcasts them.

    Args:
        module: the model, equal in shapes and dtypes on all ranks. It and its inputs stay on the device they are on.
        device_ids: None, or the one CUDA device that the module lives on.
        output_device: for torch's signature; the outputs stay where the module makes them.
        dim: for torch's signature; it has no effect with one device per process.
        broadcast_buffers: give all ranks rank 0's buffers, here and at each forward that follows one whose backward
            is reduced (the first forward included).
        init_sync: compare the models of the ranks and broadcast rank 0's values. Without it they must be equal already.
        process_group: the ranks to average over; all of them by default.
        bucket_cap_mb: size in MiB at which a bucket is closed; 0 gives each parameter its own.
        find_unused_parameters: look for parameters that a forward has left out. Where a rank has not used a parameter
            that others have, it takes part with zero, or the `.grad` that it has; where none has, `.grad` is kept
            (as a view it is part of its bucket: the mean of values that are equal after the last reduction).
        gradient_as_bucket_view: let `.grad` be views of the buckets. Otherwise they are copied in and back.

    Attributes:
        module: the wrapped model; names in the state dict begin with `module.`.
        require_backward_grad_sync: False inside `no_sync`.

    Raises:
        RuntimeError: no process group; no parameter requires a gradient; or the models of the ranks differ, which
            every rank raises, with the parameter and the ranks named.
        ValueError: an embedding makes sparse gradients; the parameters lie on several kinds of devices; `device_ids`
            has several, or another than the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: comm.Group | None = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        *,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        names = trainable_parameters(module)
        check_devices(module, device_ids, output_device)
        self.module = module
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.process_group = comm.world(process_group)
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        if init_sync:
            start_from_rank_0(module, self.process_group, broadcast_buffers)
        reducer = UnusedFindingReducer if find_unused_parameters else Reducer
        self.reducer = reducer(names, int(bucket_cap_mb * 2**20), self.process_group, gradient_as_bucket_view)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Raises:
            RuntimeError: the last backward did not reach all parameters.
        """
        if torch.is_grad_enabled():
            self.reducer.check_finished()
        buffers = list(self.module.buffers())
        if self.broadcast_buffers and self.require_forward_param_sync and buffers:
            broadcast_from_rank_0(buffers, self.process_group)
        outputs = self.module(*inputs, **kwargs)
        # Buffers can only have come to differ in a forward, and matter to no other rank until gradients meet again.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self.reducer.prepare(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward of each forward inside the `with` accumulate this rank's own gradients.

        The first backward of a forward outside reduces all that has been accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def check_devices(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> None:
    """Raise ValueError, with torch's texts, unless `device_ids` says where the module is."""
    devices = {p.device for p in module.parameters()}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if len(types := {d.type for d in devices}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {types}."
        )
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return
    there, here = torch.device("cuda", _get_device_index(device_ids[0], True)), next(iter(devices))
    if there != here:
        raise ValueError(f"device_ids is {there}, but the module is on {here}: call module.to({str(there)!r}) first")
