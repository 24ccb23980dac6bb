"""Hooks of what the optimizer has: autograd, which would call them, reaches the units' leaves only.

They get the mean, as this rank has it. (Torch calls those of a flat parameter with the rank's own gradient, which is
not reduced yet, and those of original parameters never.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from minifsdp.fsdp.whole import WholeUnit
from minifsdp.private import hooks_of, post_hooks_of, steps_in_backward


class HookedUnit(WholeUnit):
    """A unit that calls what `register_hook` has registered, on each mean before it is added to `.grad`."""

    def _deliver(self, gradient: Tensor) -> None:
        for index, p in enumerate(self.shards):
            if hooks_of(p):
                call_hooks(p, self._slices(gradient)[index])
        super()._deliver(gradient)


def call_hooks(p: nn.Parameter, gradient: Tensor) -> None:
    """On its way to `p`: what `register_hook` has registered, which may change it."""
    for hook in hooks_of(p).values():
        changed = hook(gradient)
        if changed is not None:
            gradient.copy_(changed)


def call_post_hooks(shards: Iterable[nn.Parameter]) -> None:
    """At the end of a backward: what `register_post_accumulate_grad_hook` has registered."""
    for p in shards:
        for hook in post_hooks_of(p).values():
            if p.grad is not None:
                hook(p)


def check_hooks(name: str, p: nn.Parameter, is_replaced: bool) -> None:
    """See who waits for autograd to reach a parameter that a unit has taken.

    Raises:
        RuntimeError: an optimizer, to step in backward.

    Warns:
        of hooks that are lost with the parameter.
    """
    if steps_in_backward(p):
        raise RuntimeError(
            f"the optimizer of {name} is to step in backward, before its gradient is reduced: step after backward"
        )
    if is_replaced and hooks_of(p):
        warnings.warn(f"hooks of {name} are lost: register them after wrapping, or use_orig_params=True", stacklevel=6)
