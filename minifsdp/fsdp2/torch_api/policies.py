"""Policies of `fully_shard`: dtypes, and where the shards are (torch/distributed/fsdp/_fully_shard/_fsdp_api.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minifsdp.kinds import check_dtypes, is_named, refused


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one `fully_shard`.

    Attributes:
        param_dtype: dtype of gathers and computation; None: the parameters' own dtype.
        reduce_dtype: dtype of reductions, and of gradients accumulated without reduction; None: `param_dtype`.
        output_dtype: dtype to which floating-point outputs of forward are cast; None: no cast.
        cast_forward_inputs: cast floating-point inputs of forward to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Sharded parameters, gradients and optimizer state stay on the device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state stay in host memory.

    Attributes:
        pin_memory: use pinned memory, which is needed for copies to run concurrently with the computation.
    """

    pin_memory: bool = True


NO_POLICY, ON_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


def policies(mp_policy: Any, offload_policy: Any) -> tuple[Any, Any]:
    """Ours or torch's; None: the default.

    Raises:
        TypeError: they are of other kinds, such as FSDP1's.
        NotImplementedError: the dtype is a function of the parameter (torch 2.15).
    """
    mp_policy = NO_POLICY if mp_policy is None else mp_policy
    offload_policy = ON_DEVICE if offload_policy is None else offload_policy
    if not is_named(mp_policy, "MixedPrecisionPolicy"):
        raise refused("mp_policy", mp_policy, "a MixedPrecisionPolicy of fully_shard's, such as MixedPrecisionPolicy()")
    if not is_named(offload_policy, "OffloadPolicy"):
        raise refused("offload_policy", offload_policy, "CPUOffloadPolicy() or OffloadPolicy()")
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError(
            "param_dtype_override_fn is not supported: give the modules that need another dtype a fully_shard and "
            "mp_policy of their own"
        )
    check_dtypes("mp_policy", mp_policy, "param_dtype", "reduce_dtype", "output_dtype")
    return mp_policy, offload_policy
