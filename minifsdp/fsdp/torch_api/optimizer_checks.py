"""Checks for optimizers that do not have the shards: they would silently do nothing, or the wrong thing."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp.optimizer_steps import parameters_of
from minifsdp.private import steps_in_backward

ORIGINAL_NAME = "_fsdp_taken"
"""An original parameter's attribute: its name in the unit that has taken its place, and the id of its module."""


class Taken(NamedTuple):
    """A parameter that is no shard, although the values are a unit's.

    Attributes:
        name: its qualified name.
        unit: a weak reference to the unit.
        when: when an optimizer may have got it.
    """

    name: str
    unit: weakref.ref[Any]
    when: str


_taken: Any = WeakIdKeyDictionary()


def note_taken(p: nn.Parameter, name: str, unit: Any, when: str = "before wrapping") -> None:
    """A unit has the values of `p`, and shards for the optimizer."""
    _taken[p] = Taken(name, weakref.ref(unit), when)


def noted_of(p: nn.Parameter) -> Taken | None:
    """The note on `p`, if the unit is still there."""
    found: Taken | None = _taken.get(p)
    return found if found is not None and found.unit() is not None else None


def check_not_stale(optimizer: Optimizer) -> None:
    """See that what an optimizer is to update are shards.

    Original parameters with a gradient are in a module: of a model that shared them with the one that was wrapped.

    Raises:
        RuntimeError: names some parameters that are not.
    """
    found = [noted for p in parameters_of(optimizer) if p.grad is None and (noted := noted_of(p)) is not None]
    if found:
        names, unit = [noted.name for noted in found], found[0].unit()
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise RuntimeError(
            f"the optimizer was built {found[0].when}: it holds {', '.join(names[:4])}{more}, whose values are in the "
            f"shards of FSDP units now, such as {unit and unit.title}. Build it from the wrapped model's parameters "
            "while they are sharded, for instance right after wrapping."
        )


def check_steps_after_backward(name: str, p: nn.Parameter) -> None:
    """
    Raises:
        RuntimeError: an optimizer of `p` is to step in backward (`_apply_optimizer_in_backward`).
    """
    if steps_in_backward(p):
        raise RuntimeError(
            f"the optimizer of {name} is to step in backward, before its gradient is reduced: step after backward"
        )


def check_reduced(optimizer: Optimizer) -> None:
    """See that gradients are those of the shards.

    Raises:
        RuntimeError: some have been accumulated inside `no_sync` (view.py), and not reduced.
    """
    if any(p.grad is not None and p.grad.shape != p.shape for p in parameters_of(optimizer)):
        raise RuntimeError(
            "gradients that were accumulated inside no_sync() have not been reduced: run the last backward before "
            "step() outside of it, or drop them with zero_grad()"
        )
