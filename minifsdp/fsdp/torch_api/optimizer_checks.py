"""Checks for optimizers built before wrapping, which would otherwise silently do nothing, or the wrong thing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

ORIGINAL_NAME = "_fsdp_taken"
"""An original parameter's attribute: its name in the unit that has taken its place, and the id of its module."""

owner_unit: Any = WeakIdKeyDictionary()
"""Parameters that are in no module now, and a weak reference to the unit that has their values."""


@cache
def check_every_step() -> None:
    """From now on every optimizer's `step` begins with these checks."""
    register_optimizer_step_pre_hook(check_step)


def check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    check_reduced(params)
    check_not_stale(params)


def check_not_stale(params: list[nn.Parameter]) -> None:
    """See that what an optimizer is to update is in a module.

    Parameters with a gradient are in somebody's: of a model that shared them with the one that was wrapped.

    Raises:
        RuntimeError: names some parameters that are not.
    """
    taken = {p: owner_unit[p]() for p in params if p.grad is None and p in owner_unit}
    names = [p.__dict__[ORIGINAL_NAME][0] for p, unit in taken.items() if unit is not None]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise RuntimeError(
            f"the optimizer was built before wrapping: it holds {', '.join(names[:4])}{more}, whose values are in the "
            "shards of FSDP units now. Build it from the wrapped model's parameters."
        )


def check_reduced(params: Iterable[nn.Parameter]) -> None:
    """See that gradients are those of the shards.

    Raises:
        RuntimeError: some have been accumulated inside `no_sync` (view.py), and not reduced.
    """
    if any(p.grad is not None and p.grad.shape != p.shape for p in params):
        raise RuntimeError(
            "gradients that were accumulated inside no_sync() have not been reduced: run the last backward before "
            "step() outside of it, or drop them with zero_grad()"
        )
