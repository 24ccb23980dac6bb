"""Values of sharded state dicts: types that `torch.distributed.checkpoint` saves, and loads on any number of ranks.

    full     [ rows 0 1 2 3 4 ]
    rank 0   [ rows 0 1 2 ]          dimension 0, ceil(rows / N) each: the last ranks may have fewer, or none
    rank 1   [ rows 3 4 ]

A `ShardedTensor` stores the position of each rank's rows; a `DTensor` determines it from a device mesh. A number (0-d)
cannot be sharded, so every rank has it (torch/distributed/fsdp/_shard_utils.py).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.private import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    remote_device,
    tensor_of_shards,
)


def shard_value(full: Tensor, group: Group, device_mesh: Any = None, to_cpu: bool = False) -> Any:
    """This rank's rows of `full`, copied; no communication.

    Args:
        full: the whole value, the same on every rank of the group.
        group: the ranks to shard over.
        device_mesh: shard over its last dimension, which must be `group`, and replicate over others.
        to_cpu: put the rows in host memory.

    Returns:
        A DTensor if there is a mesh, otherwise a ShardedTensor; a copy of `full` if it has no rows.
    """
    if full.dim() == 0 or full.numel() == 0:
        return copied(full, to_cpu)
    rows = -(-len(full) // group.size())
    low = rows * group.rank()
    local = copied(full[low : low + rows], to_cpu).contiguous()
    if device_mesh is None:
        return sharded_tensor(local, rows, full.shape, group)
    from torch.distributed.tensor import DTensor, Replicate  # takes half a second to import
    from torch.distributed.tensor import Shard as ShardDimension

    placements = [*[Replicate()] * (device_mesh.ndim - 1), ShardDimension(0)]
    stride = torch.empty(full.shape, device="meta").stride()
    value = DTensor.from_local(local, device_mesh, placements, run_check=False, shape=full.shape, stride=stride)
    return value.cpu() if to_cpu else value


def sharded_tensor(local: Tensor, rows: int, shape: torch.Size, group: Group) -> ShardedTensor:
    """Rank r's `local` as the rows from `r * rows` on of a tensor of this shape."""
    device = local.device
    metadata = []
    for rank in range(group.size()):
        low, holder = min(rank * rows, shape[0]), dist.get_global_rank(group, rank)
        lies_on = f"cuda:{holder % torch.cuda.device_count()}" if device.type == "cuda" else device.type
        placement = remote_device(f"rank:{holder}/{device if rank == group.rank() else lies_on}")
        offsets, sizes = ([low, *[0] * (len(shape) - 1)], [min(rows, shape[0] - low), *shape[1:]])
        metadata.append(ShardMetadata(offsets, sizes, placement))
    # A rank without rows has an empty shard: a value without any would be left out on loading (default_planner.py).
    mine = [Shard(local, metadata[group.rank()])]
    properties = TensorProperties(dtype=local.dtype)
    return tensor_of_shards(mine, ShardedTensorMetadata(metadata, shape, properties), group)


def is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedTensor) or is_dtensor(value)


def is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements")


def full_value(value: Any, group: Group, device: torch.device) -> Tensor:
    """The whole of a value of a sharded state dict, on `device`; one all-gather, none if the value is whole.

    Args:
        value: a ShardedTensor or DTensor as created by `shard_value`, or a whole tensor.
        group: the ranks over which it is sharded, all of which call this function.
        device: a device on which the group can communicate.

    Raises:
        RuntimeError: a ShardedTensor is sharded differently, for instance for a different number of ranks.
    """
    if is_dtensor(value):
        return whole_of(value)  # type: ignore[no-any-return]
    if not isinstance(value, ShardedTensor):
        return value.to(device)  # type: ignore[no-any-return]
    shape, dtype = value.metadata().size, value.metadata().tensor_properties.dtype
    rows = -(-shape[0] // group.size())
    local = torch.zeros(rows, *shape[1:], dtype=dtype, device=device)
    into_rows(local, value, group)
    full = torch.empty(rows * group.size(), *shape[1:], dtype=dtype, device=device)
    comm.all_gather(full.view(-1), local.view(-1), group).wait()
    return full[: shape[0]]


def whole_of(value: Any) -> Any:
    """A state with whole tensors instead of DTensors; one all-gather each, on all ranks of its mesh, in one order."""
    if isinstance(value, dict):
        return {key: whole_of(inner) for key, inner in value.items()}
    return value.to(value.device_mesh.device_type).full_tensor() if is_dtensor(value) else value


def into_rows(local: Tensor, value: Any, group: Group) -> None:
    """Copy what this rank holds of a ShardedTensor to `local`.

    Raises:
        RuntimeError: the tensor is not cut into pieces of as many rows as `local` has, one per rank of the group.
    """
    if not isinstance(value, ShardedTensor):
        raise AssertionError(f"Tensors in local_state_dict should be ShardedTensor, not {type(value).__name__}.")
    cuts = [(s.shard_offsets[0], s.shard_sizes[0]) for s in value.metadata().shards_metadata if s.shard_sizes[0]]
    rows, length = len(local), value.metadata().size[0]
    expected = [(low, min(rows, length - low)) for low in range(0, length, rows)]
    if sorted(cuts) != expected:
        raise RuntimeError(
            f"A ShardedTensor of {length} rows is cut into {[size for _, size in sorted(cuts)]}, but {group.size()} "
            f"ranks hold {[size for _, size in expected]}: load it through torch.distributed.checkpoint, which reshards"
        )
    for shard in value.local_shards():
        local[: len(shard.tensor)].copy_(shard.tensor)


def storage_of(value: Any) -> int:
    """The address of a tensor's storage; -1 if it is no tensor, or has no storage of its own, as a sparse one."""
    has_storage = isinstance(value, Tensor) and not is_sharded(value) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if has_storage else -1


def copied(value: Any, to_cpu: bool = False) -> Any:
    """A copy that shares no memory, with `to_cpu` of a tensor in host memory: on CPU, `.cpu()` would not copy."""
    if isinstance(value, dict):
        return {key: copied(inner, to_cpu) for key, inner in value.items()}
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return value.detach().to("cpu", copy=True) if to_cpu else value.detach().clone()
