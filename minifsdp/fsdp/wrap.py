"""Which submodules become units of their own: policies, and their application from the leaves up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn

from minifsdp.flat_param import ParamPlaces, find_parameters
from minifsdp.fsdp.unit import TAKEN_AS


class WrapPolicy(Protocol):
    """Asked of every module: look into it (`recurse=True`)? If so, after its children: wrap it (`recurse=False`)?

    `nonwrapped_numel` counts the parameters under it that no unit has taken yet. The same protocol as torch's
    (torch/distributed/fsdp/wrap.py).
    """

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool: ...


class ModuleWrapPolicy:
    """Every instance of the given classes is a unit; for a transformer, its block."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        if isinstance(module_classes, (str, type)):
            raise ValueError(f"{module_classes!r} is not a policy: give a set of module classes, such as {{Block}}")
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.module_classes)


def wrap_children(module: nn.Module, policy: WrapPolicy, wrap: Callable[[nn.Module], nn.Module]) -> int:
    """Replace the submodules that `policy` names by `wrap(submodule)`, innermost first.

    A submodule that the tree holds in several places is wrapped once.

    Returns:
        how many elements of parameters the new units have taken.
    """
    done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(parent: nn.Module) -> int:
        """Under every name: `named_children` leaves out the second one of a module that has two."""
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent: nn.Module, name: str, child: nn.Module) -> int:
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


def check_not_shared(module: nn.Module, unit: nn.Module) -> None:
    """A parameter belongs to one unit: used in two, it would be sharded twice and its two gradients never added.

    Raises:
        ValueError: names both places of a parameter that the submodule `unit` shares with the rest of `module`.
    """
    inside = set(unit.modules())
    for places in find_parameters(module).values():
        within = [place.name for place in places if place.module in inside]
        outside = [place.name for place in places if place.module not in inside]
        if within and outside:
            raise _in_two_units(within[0], outside[0])


def check_not_taken(params: ParamPlaces) -> None:
    """The same for units that are wrapped by hand: what one has taken is still where it was in the rest of the model.

    Raises:
        ValueError: names a parameter, and what it was called in the unit that has it.
    """
    for p, places in params.items():
        if TAKEN_AS in p.__dict__:
            raise _in_two_units(p.__dict__[TAKEN_AS], places[0].name)


def _in_two_units(one: str, other: str) -> ValueError:
    return ValueError(
        f"{one} and {other} are one parameter, but they would be in two units. "
        "Wrap a module that holds both, or leave both to the root."
    )
