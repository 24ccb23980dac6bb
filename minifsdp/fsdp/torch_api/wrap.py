"""Submodules become units, from the leaves up, by a policy (policies.py) or by hand with `wrap`.

with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=bf16):
    layers = [wrap(Block()) for _ in range(12)]  # outside of such a `with` they are plain blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from minifsdp.flat_param import ParamPlaces, Place, find_parameters
from minifsdp.fsdp.torch_api.ignored import Ignored
from minifsdp.fsdp.torch_api.policies import WrapPolicy
from minifsdp.fsdp.unit import Unit
from minifsdp.local_parts import has_hooks
from minifsdp.optimizer_checks import (
    ORIGINAL_NAME,
    check_not_stale,
    check_reduced,
    check_steps_after_backward,
    note_taken,
)
from minifsdp.optimizer_steps import before_every_step
from minifsdp.wrapper_names import clean_name


def wrap_children(
    module: nn.Module,
    policy: WrapPolicy,
    wrap: Callable[[nn.Module], nn.Module],
    ignored: Ignored = Ignored(),  # noqa: B008
) -> int:
    """Replace the submodules that `policy` names by `wrap(submodule)`, innermost first.

    A submodule that the tree holds in several places is wrapped once. Ignored modules are not looked into, ignored
    parameters not counted.

    Returns:
        how many elements of parameters the new units have taken.
    """
    done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(parent: nn.Module) -> int:
        """Under every name: `named_children` leaves out the second one of a module that has two."""
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        return sum({child: replace(parent, name, child) for name, child in children}.values())

    def replace(parent: nn.Module, name: str, child: nn.Module) -> int:
        if child in ignored.modules:
            return 0
        if child not in done:
            numel = sum(p.numel() for p in child.parameters() if p not in ignored.params)
            wrapped, taken = child, 0
            if policy(module=child, recurse=True, nonwrapped_numel=numel):
                taken = visit(child)
                if policy(module=child, recurse=False, nonwrapped_numel=numel - taken):
                    wrapped, taken = wrap(child), numel
            done[child] = wrapped, taken
        setattr(parent, name, done[child][0])
        return done[child][1]

    return visit(module)


# By hand

_enabled: tuple[Callable[..., nn.Module], dict[str, Any]] | None = None


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside the `with`, `wrap` wraps.

    Args:
        wrapper_cls: with what, such as `FullyShardedDataParallel`.
        wrapper_kwargs: its arguments.

    Raises:
        NotImplementedError: such a `with` inside another.
    """
    global _enabled
    if _enabled is not None:
        raise NotImplementedError(
            "You are already within an autowrap context and we currently do not supported nested autowrap: "
            "give wrap() the arguments that differ."
        )
    _enabled = wrapper_cls, wrapper_kwargs
    try:
        yield
    finally:
        _enabled = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """`module` wrapped as `enable_wrap` says, with these arguments before its; outside of it, `module` as it is."""
    if _enabled is None:
        return module
    wrapper, arguments = _enabled
    return wrapper(module, **arguments | wrap_overrides)


# One parameter, one unit: used in two, it would be sharded twice and its two gradients never added.


def check_not_shared(module: nn.Module, unit: nn.Module) -> None:
    """See that the submodule `unit` can be wrapped.

    Raises:
        ValueError: names both places of a parameter that it shares with the rest of `module`.
    """
    check_all_inside(find_parameters(module).values(), unit)


def check_all_inside(parameters: Iterable[list[Place]], unit: nn.Module) -> None:
    """The same with the parameters looked up beforehand."""
    inside = set(unit.modules())
    for places in parameters:
        within = [place.name for place in places if place.module in inside]
        outside = [place.name for place in places if place.module not in inside]
        if within and outside:
            raise _in_two_units(within[0], outside[0])


def mark_taken(params: ParamPlaces, unit: Unit) -> None:
    """Note on the parameters that `unit` has them now, for units that are wrapped by hand later, and for optimizers."""
    before_every_step(check_reduced)
    before_every_step(check_not_stale)
    for p, (place, *_) in params.items():
        now = place.module._parameters.get(place.attribute)  # p with original parameters, another if it came from meta
        for taken in (p, now):
            if taken is not None:
                taken.__dict__[ORIGINAL_NAME] = place.name, id(place.module)
        check_hooks(place.name, p, now)
        if now is not p:
            note_taken(p, place.name, unit)


def check_hooks(name: str, p: nn.Parameter, now: nn.Parameter | None) -> None:
    """See who waits for autograd to reach a parameter that a unit has taken.

    Args:
        name: its name, for messages.
        p: the parameter.
        now: the one in its place; None: a flat parameter has its values.

    Raises:
        RuntimeError: an optimizer, to step in backward; or hooks that would be lost with it.
    """
    check_steps_after_backward(name, p)
    if now is not p and has_hooks(p):
        cure = ", or use_orig_params=True" if now is None else ""
        raise RuntimeError(f"hooks of {name} would be lost: register them after wrapping{cure}")


def check_not_taken(params: ParamPlaces, root: nn.Module) -> None:
    """For units that are wrapped by hand: what one has taken is still where it was in the rest of the model `root`.

    Raises:
        ValueError: names a parameter, and what it is called in the unit that has it.
    """
    for p, places in params.items():
        if ORIGINAL_NAME in p.__dict__:
            name, holder = p.__dict__[ORIGINAL_NAME]
            if holder in {id(place.module) for place in places}:
                raise ValueError(
                    f"FSDP has been applied to the module of {places[0].name} already: use what it returned"
                )
            prefix = next((clean_name(path) for path, module in root.named_modules() if id(module) == holder), "")
            attribute = name.rpartition(".")[2]
            raise _in_two_units(f"{prefix}.{attribute}" if prefix else name, places[0].name)


def _in_two_units(one: str, other: str) -> ValueError:
    return ValueError(
        f"{one} and {other} are one parameter, but they would be in two units. "
        "Wrap a module that holds both, or leave both to the root."
    )
