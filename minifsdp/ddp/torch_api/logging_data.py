"""Logging data on a model's buckets and settings, under torch's names (torch/csrc/distributed/c10d/logger.cpp)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minifsdp import private


def logging_data(ddp: Any) -> dict[str, str | int]:
    """Texts and numbers of a DistributedDataParallel, but for those of torch's clock and environment variables.

    `bucket_sizes` and `rebuilt_bucket_sizes` are in bytes, in the order of the launches; buckets are built again of a
    static graph only. As in torch a truth is 0 or 1, there is no number of an iteration before the second, and
    `static_graph`, `comm_hook` and `join_uneven_inputs` are there if they are used.
    """
    reducer = ddp.reducer
    data: dict[str, str | int] = {
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "backend_name": private.backend_of(ddp.process_group, ddp.device),
        "module_name": type(ddp.module).__name__,
        "device_ids": _commas(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "bucket_cap_bytes": ddp.bucket_bytes_cap_list[-1],
        "bucket_sizes": _commas(reducer.first_sizes),
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.params),
        "dtypes": _commas(sorted({_type_in_cpp(p.dtype) for p in reducer.params})),
        "iteration": max(0, reducer.forwards - 1),
    }
    if ddp.static_graph:
        data["static_graph"] = 1
    if ddp._comm_hook is not None:
        hook = ddp._comm_hook[1]
        data["comm_hook"] = getattr(hook, "__qualname__", repr(hook))
    if ddp.has_joined:
        data["join_uneven_inputs"] = 1
    if reducer.forwards > 1:
        data["has_rebuilt_buckets"] = int(reducer.sizes() != reducer.first_sizes)
        data["num_buckets_reduced"] = len(reducer.buckets)
        data["unused_parameter_size"] = reducer.unused_bytes
    if data.get("has_rebuilt_buckets"):
        data["rebuilt_bucket_sizes"] = _commas(reducer.sizes())
    return data


def _type_in_cpp(dtype: torch.dtype) -> str:
    """As torch's logger writes it."""
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    names[torch.bfloat16] = "c10::BFloat16"
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _commas(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
