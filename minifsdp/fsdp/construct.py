"""Steps of wrapping: which submodules become units, and what is left for the module itself.

In torch's order: inner units first (from the leaves up), so that a module's own unit is what no inner unit has taken;
its memory only then (materialize.py); flattened and sharded last.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from minifsdp.flat_param import ParamPlaces, find_parameters
from minifsdp.fsdp.ignored import Ignored
from minifsdp.fsdp.options import ShardingStrategy
from minifsdp.fsdp.wrap import ModuleWrapPolicy, check_not_shared, check_not_taken, wrap_children


def clamp(strategy: ShardingStrategy, ranks: int) -> ShardingStrategy:
    """One rank has no one to shard with."""
    if ranks > 1 or strategy is ShardingStrategy.NO_SHARD:
        return strategy
    warnings.warn(f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=3)
    return ShardingStrategy.NO_SHARD


def wrap_submodules(
    module: nn.Module, policy: Any, ignored: Ignored, wrapper: type[nn.Module], arguments: dict[str, Any]
) -> None:
    """Replace the submodules that `policy` names by `wrapper(submodule, **arguments)`.

    Raises:
        ValueError: some submodule is wrapped already, or shares a parameter with the rest of `module`.
    """

    def wrap(child: nn.Module) -> nn.Module:
        check_not_shared(module, child)
        return wrapper(child, **arguments)

    for name, inner in module.named_modules():
        if isinstance(inner, wrapper):
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in "
                f"{type(module).__name__}: leave all of it to the policy, or wrap all of it by hand"
            )
    if isinstance(policy, type) or not callable(policy):
        policy = ModuleWrapPolicy(policy)
    wrap_children(module, policy, wrap)


def managed_modules(module: nn.Module, wrapper: type[nn.Module], ignored: Ignored) -> list[nn.Module]:
    """`module` and what is under it, without wrapped and ignored modules and what is under these."""
    others = {m for inner in module.modules() if isinstance(inner, wrapper) for m in inner.modules()}
    return [m for m in module.modules() if m not in others and m not in ignored.modules]


def managed_parameters(module: nn.Module, managed: list[nn.Module], ignored: Ignored) -> ParamPlaces:
    """The parameters that are left for the unit of `module`.

    Raises:
        ValueError: another unit has taken one of them.
    """
    others = set(module.modules()) - set(managed)
    found = find_parameters(module, skip=others)
    params = {p: places for p, places in found.items() if p not in ignored.params}
    check_not_taken(params)
    return params
