"""Which submodules become units of their own: policies, and their application from the leaves up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn

from minifsdp.flat_param import find_parameters


class WrapPolicy(Protocol):
    """Asked of every module: look into its children (`recurse=True`)? Wrap it itself (`recurse=False`)?

    `nonwrapped_numel` counts the parameters under it that no unit has taken yet. The same protocol as torch's
    (torch/distributed/fsdp/wrap.py).
    """

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool: ...


class ModuleWrapPolicy:
    """Every instance of the given classes is a unit; for a transformer, its block."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.module_classes)


def wrap_children(module: nn.Module, policy: WrapPolicy, wrap: Callable[[nn.Module], nn.Module]) -> int:
    """Replace the submodules that `policy` names by `wrap(submodule)`, innermost first.

    A submodule that the tree holds in several places is wrapped once.

    Returns:
        how many elements of parameters the new units have taken.
    """
    done: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module) -> int:
        # `_modules`, since `named_children` leaves out a module's second name.
        return sum(replace(parent, name, child) for name, child in list(parent._modules.items()) if child is not None)

    def replace(parent: nn.Module, name: str, child: nn.Module) -> int:
        taken = 0
        if child not in done:
            numel = sum(p.numel() for p in child.parameters())
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
            done[child] = child
            if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                done[child], taken = wrap(child), numel
        setattr(parent, name, done[child])
        return taken

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
            raise ValueError(
                f"{within[0]} and {outside[0]} are one parameter, but the wrap policy puts them into two units. "
                "Wrap a module that holds both, or leave both to the root."
            )
