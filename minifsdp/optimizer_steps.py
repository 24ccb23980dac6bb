"""Every optimizer step, also of optimizers that know nothing of minifsdp: checks before it, and their number."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@cache
def before_every_step(check: Callable[[Optimizer], None]) -> None:
    """From now on every optimizer's `step` begins with this check, once for however many calls."""

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        check(optimizer)

    register_optimizer_step_pre_hook(begin)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class OverShards(Optimizer):
    """An optimizer of whole parameters, such as ZeRO's, that has another one update this rank's shards of them.

    Attributes:
        inner: the other one, which has the shards' state.
    """

    inner: Optimizer


def updating(optimizer: Optimizer) -> Optimizer:
    """The optimizer that updates: itself, or the one inside."""
    return optimizer.inner if isinstance(optimizer, OverShards) else optimizer


@cache
def _counter() -> list[int]:
    """The number of steps, counted from now on."""
    steps, numbers = [0], count(1)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps[0] = next(numbers)

    register_optimizer_step_post_hook(stepped)
    return steps


def steps_taken() -> int:
    """The number of optimizer steps on this rank since this was first called, which is the same on all ranks.

    A parameter's version shows that it was written to, but not on every rank: an optimizer does not change a parameter
    for which this rank has no gradient.
    """
    return _counter()[0]
