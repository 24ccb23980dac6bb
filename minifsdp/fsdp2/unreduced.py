"""The `.grad` of parameters between a backward pass without gradient sync and the next reduction.

The gradients are unsharded in their units then, and `.grad` contains only what was reduced before. An optimizer would
step without them, and `zero_grad` would leave them to be added to the next ones. So where `.grad` would be None, it is
a tensor of zeros, which takes no memory: `zero_grad` drops it, and with it the unit's gradient; a step is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from minifsdp.local_parts import like, local_of
from minifsdp.optimizer_steps import before_every_step, parameters_of
from minifsdp.private import DisableTorchFunctionSubclass, tree_map, version_of

_ZEROES = ("zero_", "_foreach_zero_")


class Zeros(Tensor):
    """A tensor of zeros in the memory of one; in all operations it is a plain one, and none changes it."""

    is_dropped = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket.__name__ in _ZEROES:
            tree_map(_drop, args)
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _drop(value: Any) -> None:
    if isinstance(value, Zeros):
        value.is_dropped = True


def _plain(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Zeros) else value


def _version(grad: Tensor) -> int:
    return version_of(grad) + version_of(local_of(grad))


class Unreduced:
    """The `.grad` of some parameters while their gradients are in a unit.

    Args:
        params: the parameters, by index; the same on all ranks.
    """

    def __init__(self, params: Iterable[tuple[int, nn.Parameter]]) -> None:
        before_every_step(check_none_shown)
        self._those: list[tuple[int, nn.Parameter, Tensor, int | None]] = []
        for index, p in params:
            version = None if p.grad is None else _version(p.grad)
            if p.grad is None:
                local = local_of(p)
                zeros = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
                p.grad = like(zeros.as_subclass(Zeros), p)
            self._those.append((index, p, p.grad, version))
        _shown.add(self)

    def is_in(self, params: set[int]) -> bool:
        """True if one of these parameters, by identity, still shows it."""
        return any(id(p) in params and p.grad is grad for _, p, grad, _ in self._those)

    def end(self) -> list[int]:
        """Let `.grad` be what it was; returns the parameters whose gradients were dropped meanwhile."""
        dropped = []
        for index, p, grad, version in self._those:
            if p.grad is not grad:
                dropped.append(index)
            elif version is None:
                p.grad = None
                if getattr(local_of(grad), "is_dropped", False):
                    dropped.append(index)
            elif _version(grad) > version and not local_of(grad).any():
                dropped.append(index)
        self._those = []
        return dropped


_shown: WeakSet[Unreduced] = WeakSet()


def check_none_shown(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: gradients of its parameters have not been reduced; on all ranks.
    """
    if not _shown:
        return
    params = {id(p) for p in parameters_of(optimizer)}
    if any(each.is_in(params) for each in _shown):
        raise RuntimeError(
            "gradients that were accumulated without gradient sync have not been reduced: run the last backward before "
            "step() after set_requires_gradient_sync(True), or drop them with zero_grad()"
        )
