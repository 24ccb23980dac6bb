"""Methods other than `forward` that compute with a unit's parameters, such as `generate()`."""

from __future__ import annotations

from functools import partial, update_wrapper

from torch import nn

from minifsdp.fsdp.torch_api.api import FullyShardedDataParallel


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of the wrapped module gather and free as its forward does (torch has this for `fully_shard` only).

    The units inside gather when they are called. All ranks have to call the method, and with as many steps each: a
    rank whose `generate()` ends early leaves the others alone in their collectives.

    Args:
        module: what to register on; nothing is done if it is no FullyShardedDataParallel.
        method_name: the method's name.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FullyShardedDataParallel):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module)} does not have a method {method_name}, nor has {type(module.module)}")
    setattr(module, method_name, update_wrapper(partial(module.run, method), method))
