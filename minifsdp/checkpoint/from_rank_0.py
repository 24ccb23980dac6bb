"""State that only rank 0 has: the other ranks receive an outline of it, and then one tensor at a time on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.checkpoint.sharded_values import is_sharded
from minifsdp.comm import Group


def outline_from_rank_0(state_dict: Mapping[str, Any], source: Group) -> dict[str, Any]:
    """On rank 0 of `source` what it has; elsewhere the same with tensors on meta, but for numbers (0-d).

    Raises:
        ValueError: rank 0 has sharded, sparse or quantized values; on every rank.
    """
    has_it = source.rank() == 0
    mine: Any = None
    try:
        mine = outline(state_dict) if has_it else None
    except ValueError as error:
        mine = error
    sent = comm.gather_objects(mine, source)[0]
    if isinstance(sent, ValueError):
        raise sent
    return dict(state_dict) if has_it else sent


def outline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: outline(inner) for key, inner in value.items()}
    if is_sharded(value):
        raise ValueError(
            "rank 0 sends whole values, but some are sharded: save them with full_state_dict=True, or load them on all "
            "ranks without broadcast_from_rank0"
        )
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided or value.is_quantized:
        kind = value.dtype if value.is_quantized else value.layout
        raise ValueError(f"rank 0 sends dense values, but one is {kind}: pass a dense one, or the state on all ranks")
    return torch.empty_like(value, device="meta") if value.dim() else value.cpu()  # not onto the GPU that is rank 0's


def receive(value: Any, source: Group, device: torch.device) -> Any:
    """A value of an outline as rank 0 has it; all ranks call this, in the same order.

    Args:
        value: of `outline_from_rank_0`.
        source: the group that was given there.
        device: where the group can communicate.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.is_meta:
        here = torch.empty(value.shape, dtype=value.dtype, device=device)  # in the order of rows, whatever rank 0 has
    else:
        here = value.detach().to(device).resolve_conj().resolve_neg().contiguous()
    comm.broadcast(here.view(-1).view(torch.uint8), 0, source).wait()  # as bytes: not every backend knows every dtype
    return here
