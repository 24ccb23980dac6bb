"""Buffers in a state dict: in the dtype that they had, whatever a mixed precision computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from minifsdp.fsdp.state.names import WRAPPED, clean_name
from minifsdp.fsdp.state.values import is_sharded

if TYPE_CHECKING:
    from minifsdp.fsdp.state.methods import StateMethods


def restore(instance: StateMethods, state: dict[str, Any], prefix: str, to_cpu: bool) -> None:
    """Cast back what was cast; with `to_cpu`, move to the host what is not there: all under `prefix`."""
    wrapped = instance._modules[WRAPPED]
    assert wrapped is not None
    for path, module in wrapped.named_modules(remove_duplicate=False) if instance._buffer_dtypes else ():
        for attribute in module._buffers:
            name = prefix + clean_name(f"{path}.{attribute}" if path else attribute)
            dtype = instance._buffer_dtypes.get((module, attribute))
            if dtype is not None and name in state:
                state[name] = state[name].to(dtype)
    if to_cpu:
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and not is_sharded(value):
                state[name] = value.cpu()
