"""Checks before every optimizer step, also of optimizers that know nothing of minifsdp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


@cache
def before_every_step(check: Callable[[Optimizer], None]) -> None:
    """From now on every optimizer's `step` begins with this check, once for however many calls."""

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        check(optimizer)

    register_optimizer_step_pre_hook(begin)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
