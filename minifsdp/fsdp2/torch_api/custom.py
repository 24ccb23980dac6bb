"""Collectives supplied by the user: `set_custom_all_gather`, `set_custom_reduce_scatter`.

    custom.allocate(size, dtype=, device=)                                    memory for the data sent and received
    custom(output_tensor=, input_tensor=, group=)                             an all-gather
    custom(output_tensor=, input_tensor=, group=, op=)                        a reduce-scatter

This memory may be special to a link, or a buffer that is used repeatedly. It stays the user's: values are copied into
it and out of it, in the collective's queue, and it is neither kept nor freed here
(torch/distributed/fsdp/_fully_shard/_fsdp_api.py, `Comm`; leaves and gradients are copied out of it there, too).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.comm import Group, Label


@torch.no_grad()
def all_gather(custom: Any, output: Tensor, shard: Tensor, group: Group, label: Label | None = None) -> Any:
    """`output` [N * numel] <- every rank's `shard` [numel]; returns a handle to wait for."""
    gathered = _memory(custom, output)
    mine = gathered.view(group.size(), -1)[group.rank()]
    mine.copy_(shard)
    work = custom(output_tensor=gathered, input_tensor=mine, group=group)
    return _done(work, output, gathered)


@torch.no_grad()
def reduce_scatter(custom: Any, output: Tensor, full: Tensor, group: Group, op: Any) -> Any:
    """`output` [numel] <- this rank's part of the reduction of `full` [N * numel]; returns a handle to wait for."""
    given, result = _memory(custom, full), _memory(custom, output)
    given.copy_(full)
    work = custom(output_tensor=result, input_tensor=given, group=group, op=op)
    return _done(work, output, result)


def _memory(custom: Any, like: Tensor) -> Any:
    return custom.allocate((like.numel(),), dtype=like.dtype, device=like.device)


def _done(work: Any, output: Tensor, result: Tensor) -> Any:
    if work is not None:
        work.wait()
    output.copy_(result)
    return device.current_stream(output.device).record_event()
