"""The number of optimizer steps on this rank, which is the same on all ranks.

A parameter's version shows that it was written to, but not on every rank: an optimizer does not change a parameter for
which this rank has no gradient.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


@cache
def _counter() -> list[int]:
    """The number of steps, counted from now on."""
    steps, numbers = [0], count(1)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps[0] = next(numbers)

    register_optimizer_step_post_hook(stepped)
    return steps


def steps_taken() -> int:
    """The number of optimizer steps since this was first called."""
    return _counter()[0]
