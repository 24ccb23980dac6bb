"""Mixed precision outside of the units: the dtypes of buffers, and the exception for evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from minifsdp.fsdp.torch_api.materialize import own_buffers

BufferDtypes = dict[tuple[nn.Module, str], torch.dtype]
"""What buffers had before they were cast, by their module and attribute."""


def computes_exactly(module: nn.Module) -> bool:
    """True if forward must use the shards' own dtype, whatever the requested precision.

    So it is in eval mode, with `FSDP_USE_FULL_PREC_IN_EVAL=1` in the environment.
    """
    return not module.training and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


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
