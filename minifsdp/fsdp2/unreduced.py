"""The `.grad` of parameters between a backward pass without gradient sync and the next reduction.

The gradients are unsharded in their units then, and `.grad` would contain only what was reduced before. An optimizer
would step without the rest, clipping would measure a part, and `zero_grad` would leave the rest to be added to the next
gradients. So until then `.grad` is a stand-in: `zero_grad` drops it, and with it the unit's gradient; all else is
refused.
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
from minifsdp.private import DisableTorchFunctionSubclass, tree_leaves, tree_map

_ZEROES = ("zero_", "_foreach_zero_")
_NOT_REDUCED = (
    "gradients that were accumulated without gradient sync have not been reduced: before clipping or step(), run the "
    "last backward after set_requires_gradient_sync(True), or drop them with zero_grad()"
)


class StandIn(Tensor):
    """This rank's part of a gradient that is not here: it may be zeroed, and no operation can read it.

    Attributes:
        why: the error of all other operations, on all ranks alike.
        is_zeroed: it was.
    """

    why: str
    is_zeroed = False

    @classmethod
    def of(cls, p: Tensor, why: str, device: torch.device | None = None) -> Tensor:
        """One for the gradient of `p`, with the memory of one number."""
        local = local_of(p)
        made = torch.empty((), dtype=local.dtype, device=device or local.device).expand(local.shape).as_subclass(cls)
        made.why = why
        return like(made, p)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.why}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self.why)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, cls):
                if func.overloadpacket.__name__ not in _ZEROES:
                    raise RuntimeError(each.why)
                each.is_zeroed = True
        return func(*tree_map(lambda each: torch.empty(0) if isinstance(each, cls) else each, args))


class Unreduced:
    """The `.grad` of some parameters while their gradients are in a unit.

    Args:
        params: the parameters, by index; the same on all ranks.
    """

    def __init__(self, params: Iterable[tuple[int, nn.Parameter]]) -> None:
        before_every_step(check_none_shown)
        self._those: list[tuple[int, nn.Parameter, Tensor, Tensor | None]] = []
        for index, p in params:
            earlier, p.grad = p.grad, StandIn.of(p, _NOT_REDUCED)
            self._those.append((index, p, p.grad, earlier))
        _shown.add(self)

    def is_in(self, params: set[int]) -> bool:
        """True if one of these parameters, by identity, still shows it."""
        return any(id(p) in params and p.grad is shown for _, p, shown, _ in self._those)

    def end(self) -> list[int]:
        """Let `.grad` be what it was; returns the parameters whose gradients were dropped meanwhile."""
        dropped = []
        for index, p, shown, earlier in self._those:
            is_there, is_zeroed = p.grad is shown, is_zeroed_stand_in(shown)
            if is_zeroed or not is_there:
                dropped.append(index)
            if is_there:
                p.grad = earlier if earlier is None or not is_zeroed else earlier.zero_()
        self._those = []
        return dropped


_shown: WeakSet[Unreduced] = WeakSet()


def is_zeroed_stand_in(grad: Tensor) -> bool:
    """True if it is one, and was zeroed."""
    return getattr(local_of(grad), "is_zeroed", False)


def check_none_shown(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: gradients of its parameters have not been reduced; on all ranks.
    """
    if not _shown:
        return
    params = {id(p) for p in parameters_of(optimizer)}
    if any(each.is_in(params) for each in _shown):
        raise RuntimeError(_NOT_REDUCED)
