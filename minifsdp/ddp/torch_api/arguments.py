"""Arguments of `DistributedDataParallel`: their meaning, and the errors for bad ones (torch's texts first)."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minifsdp import comm, private, process_groups
from minifsdp.kinds import bytes_of_mib, check_mesh
from minifsdp.local_parts import check_replicated
from minifsdp.nesting import DDP, refuse_nested
from minifsdp.tree import map_tensors

REFUSED = {
    "delay_all_reduce_named_params": "all buckets are reduced as they fill; to reduce parameters by other means, leave "
    "them out with _set_params_and_buffers_to_ignore_for_model",
    "param_to_hook_all_reduce": "it only says when delay_all_reduce_named_params are reduced, which is not supported",
    "mixed_precision": "use torch.autocast, or FullyShardedDataParallel with NO_SHARD and MixedPrecision",
    "skip_all_reduce_unused_params": "pass static_graph=True, which reduces only what some rank uses",
    "batched_grad_copy": "gradients are copied as they arrive; gradient_as_bucket_view=True copies none that is kept",
}


def refuse(**arguments: Any) -> None:
    """Raise NotImplementedError for the first of the arguments that is set, with the reason."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"DistributedDataParallel does not support {name}: {REFUSED[name]}")


def warn_of_no_effect(check_reduction: bool, finds_unused_of_static: bool) -> None:
    """Torch's warnings for arguments that have no effect."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
    if finds_unused_of_static:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically, so you do not need to set find_unused_parameters=true",
            stacklevel=3,
        )


def choose_group(process_group: comm.Group | None, device_mesh: Any) -> comm.Group:
    """The group to reduce over: the one given, that of a mesh with one dimension, or the default group.

    Raises:
        RuntimeError: both are given; the mesh has several dimensions; or there is no process group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        return comm.world(process_group)
    check_mesh("device_mesh", device_mesh)
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Pass the dimension of the replicas: "
            "device_mesh['name']"
        )
    return process_groups.mesh_group(device_mesh, 0)


def bucket_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> list[int]:
    """Bytes at which the buckets are closed, in the order of the buckets; the last value applies to all further ones.

    By default the first bucket is small, because communication begins with it.
    """
    caps = bucket_cap_mb_list or ([1, 25] if bucket_cap_mb is None else [bucket_cap_mb])
    return [bytes_of_mib("bucket_cap_mb", cap) for cap in caps]


def when_to_sync_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Two flags: broadcast rank 0's buffers at construction, and at each forward."""
    if broadcast_buffers is not None:
        both = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided."
        )
        old = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which does not concern "
            "construction: only `broadcast_buffers=False` keeps each rank's own buffers there too."
        )
        warnings.warn(old if forward_sync_buffers is None else both, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    return broadcast_buffers is not False, broadcast_buffers is not False


def check_devices(
    devices: set[torch.device],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """`device_ids` and `output_device` as indices of CUDA devices, for parameters on `devices`.

    Raises:
        ValueError: they do not match these devices; or `devices` are of several kinds.
    """
    if not (device_ids is None or isinstance(device_ids, Sequence)):
        raise ValueError(f"device_ids={device_ids!r}: give a list of one device, or leave it out")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if len(types := {d.type for d in devices}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {types}."
        )
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            has_cuda = torch.cuda.device_count() > 0
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}: "
                f"leave both out, {'or move the module to a GPU' if has_cuda else 'there is no CUDA device here'}"
            )
        return None, None
    there, here = torch.device("cuda", private.device_index(device_ids[0], True)), next(iter(devices))
    if there != here:
        raise ValueError(f"device_ids is {there}, but the module is on {here}: call module.to({str(there)!r}) first")
    return [there.index], private.device_index(there if output_device is None else output_device, True)


def check_modules(module: nn.Module) -> None:
    """Refuse modules whose training would be wrong without an error.

    Raises:
        ValueError: there are batch statistics over ranks on CPU, or parameters whose gradients have a different dtype.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and any(p.device.type == "cpu" for p in child.parameters()):
            raise ValueError(f"SyncBatchNorm layers only work with GPU modules, and {name or 'the module'} is on CPU")
    for name, p in module.named_parameters():
        if getattr(p, "grad_dtype", p.dtype) not in (p.dtype, None):
            raise ValueError(
                f"parameter {name} has grad_dtype {p.grad_dtype}, but buckets have its own: leave it unset"
            )


def check_replicas(module: nn.Module, group: comm.Group, ignored: Collection[str]) -> None:
    """
    Raises:
        ValueError: a parameter is sharded over ranks of the group.
    """
    for name, p in module.named_parameters():
        if name not in ignored:
            check_replicated(p, f"parameter {name}", group)


def check_still_there(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """
    Raises:
        ValueError: since construction, another wrapper or tensor parallelism has taken a parameter.
    """
    if gone := names.keys() - set(module.parameters()):
        name = next(name for p, name in names.items() if p in gone)
        raise ValueError(f"parameter {name} was replaced after DDP had wrapped the module: wrap it with DDP last")
    refuse_nested(DDP, module, [p for p in module.parameters() if p not in names])


def check_optimizers(module: nn.Module) -> None:
    """Raise NotImplementedError if an optimizer steps inside backward, before gradients are reduced."""
    for name, p in module.named_parameters():
        if private.steps_in_backward(p):
            raise NotImplementedError(
                f"parameter {name} has an optimizer that steps inside backward, before its gradient is reduced: "
                "step after backward instead of _apply_optimizer_in_backward"
            )


def to_device(tree: Any, device: torch.device) -> Any:
    """The same nesting of containers, with its tensors on `device`.

    As in torch, the host waits for copies from its memory, because the caller may write the next batch there.
    """
    return map_tensors(lambda tensor: tensor.to(device), tree)
