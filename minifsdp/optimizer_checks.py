"""Checks for optimizers that do not have the shards: they would silently do nothing, or the wrong thing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
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


BEFORE_WRAPPING = "before wrapping"
UNSHARDED = "while parameters were unsharded"
_taken: Any = WeakIdKeyDictionary()
_ids: set[int] = set()
"""Of all that were ever in `_taken`: a quick answer for the others."""


def note_taken(p: nn.Parameter, name: str, unit: Any, when: str = BEFORE_WRAPPING) -> None:
    """A unit has the values of `p`, and shards for the optimizer."""
    _taken[p] = Taken(name, weakref.ref(unit), when)
    _ids.add(id(p))


def noted_of(p: Tensor) -> Taken | None:
    """The note on `p`, if the unit is still there."""
    found: Taken | None = _taken.get(p) if id(p) in _ids else None
    return found if found is not None and found.unit() is not None else None


def check_not_stale(optimizer: Optimizer) -> None:
    """See that what an optimizer is to update are shards.

    Raises:
        RuntimeError: names some parameters that are not.
    """
    check_shards(parameters_of(optimizer), "the optimizer was built {}: it holds", "Build it from")


def check_shards(params: Iterable[Tensor], fault: str, cure: str) -> None:
    """See that no unit has the values of these parameters.

    Parameters from before wrapping with a gradient are in a module: of a model that shared them with the wrapped one.

    Args:
        fault: the begin of the error, with {} for when the parameters were taken.
        cure: what to do with the wrapped model's parameters.

    Raises:
        RuntimeError: names some that are not.
    """
    noted = [(p, noted_of(p)) for p in params]
    found = [each for p, each in noted if each is not None and (p.grad is None or each.when != BEFORE_WRAPPING)]
    if found:
        names, unit = [each.name for each in found], found[0].unit()
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise RuntimeError(
            f"{fault.format(found[0].when)} {', '.join(names[:4])}{more}, whose values are in the shards of FSDP units "
            f"now, such as {unit and unit.title}. {cure} the wrapped model's parameters while they are sharded, for "
            "instance right after wrapping."
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
    """See that gradients are those of the shards; raises as `check_none_accumulated` does."""
    check_none_accumulated(parameters_of(optimizer))


def check_none_accumulated(params: Iterable[Tensor]) -> None:
    """
    Raises:
        RuntimeError: gradients have been accumulated inside `no_sync` (view.py), and not reduced.
    """
    if any(p.grad is not None and p.grad.shape != p.shape for p in params):
        raise RuntimeError(
            "gradients that were accumulated inside no_sync() have not been reduced: before clipping or step(), run "
            "the last backward outside of it, or drop them with zero_grad()"
        )
