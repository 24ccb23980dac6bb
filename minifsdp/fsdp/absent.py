"""Stand-ins for parameters while their unit is sharded."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from minifsdp.private import tree_leaves


class Owner(Protocol):
    """A unit, as far as messages and stand-ins need it."""

    title: str
    leaves: list[nn.Parameter]
    device: torch.device


class Absent(torch.Tensor):
    """Replaces a parameter while its unit is sharded: it has its shape and dtype, and any use raises an error."""

    unit: Owner
    parameter: str

    harmless = frozenset(
        ["__get__", "__len__", "__repr__", "detach", "dim", "is_floating_point", "numel", "size", "stride"]
    )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the unsharded parameter."""
        return self.unit.device

    @classmethod
    def like(cls, leaf: torch.Tensor) -> Absent:
        return torch.empty_like(leaf, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.harmless:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if isinstance(result, cls):  # of `detach` or `data`
                result.unit, result.parameter = args[0].unit, args[0].parameter
            return result
        absent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func is torch.Tensor.to and absent is not args[0]:
            return args[0].to(absent.device, absent.dtype)
        raise sharded_error(func.__name__, absent.parameter, absent.unit)


def sharded_error(what: str, parameters: str, unit: Owner) -> RuntimeError:
    """The error for a use of parameters while their unit is sharded: their names, their unit, and the cure."""
    return RuntimeError(
        f"{what} needs {parameters} of the FSDP unit {unit.title}, which is sharded; its parameters are whole only "
        "inside its forward. Call the wrapped module itself; for another method, such as generate(), use "
        "register_fsdp_forward_method(model, 'generate') or FullyShardedDataParallel.summon_full_params."
    )
