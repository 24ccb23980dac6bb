"""Methods of a sharded module that gather and free as its forward does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn

from minifsdp.fsdp2.hooks import has_module_group, state_of


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather and free as forward does; this has no effect on a module that is not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not has_module_group(module):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    setattr(module, method_name, wraps(method)(partial(running, method, module)))


def running(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`call(*args, **kwargs)` with the module's parameters whole, as in its forward."""
    group = state_of(module)
    args, kwargs = group.before(module, args, kwargs)
    output = None
    try:
        output = call(*args, **kwargs)
    finally:
        output = group.after(module, args, output)
    return output
