"""The steps of wrapping: choosing the submodules that become units, and the parameters left for the module itself.

The order is torch's. Inner units come first (from the leaves up), so that a module's own unit takes the remaining
parameters. Then the module gets its memory (materialize.py). Flattening and sharding come last.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from minifsdp import process_groups
from minifsdp.comm import Group
from minifsdp.device import asked_for, compute_device
from minifsdp.flat_param import ParamPlaces, find_parameters
from minifsdp.fsdp.torch_api.ignored import Ignored
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.fsdp.torch_api.wrap import check_not_taken
from minifsdp.fsdp.torch_api.wrapped import instances_in
from minifsdp.wrapper_names import FLAT_PARAM


def clamp(strategy: ShardingStrategy, ranks: int) -> ShardingStrategy:
    """One rank has no one to shard with."""
    if ranks > 1 or strategy is ShardingStrategy.NO_SHARD:
        return strategy
    warnings.warn(f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=3)
    return ShardingStrategy.NO_SHARD


def warn_if_never_called(module: nn.Module) -> None:
    """A unit gathers when its module is called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {module}", stacklevel=3
        )


def find_device(device_id: Any, module: nn.Module, ignored: Ignored, group: Group) -> torch.device:
    """The device the unit computes on: `device_id`, else the module's, else one that the group's backend serves.

    Args:
        device_id: a device, or the index of a CUDA device.
        module: what is to be wrapped.
        ignored: may be elsewhere.
        group: whose backend decides if nothing else does.

    Raises:
        RuntimeError, ValueError: with torch's texts: the parameters are on several devices, or not on `device_id`.
        ValueError: there is no such device here.
    """
    wanted = None if device_id is None else asked_for(device_id, "device_id")
    own = managed_parameters(module, ignored)
    host = torch.device("cpu")
    first_on = {p.device: places[0].name for p, places in reversed(own.items()) if not p.is_meta}
    on = set(first_on)
    found = ", ".join(f"{first_on[device]} is on {device}" for device in sorted(on, key=str))
    if len(on - {host}) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {on}: {found}")
    if len(on) == 2 and device_id is None:
        raise RuntimeError(
            f"To support a module with both CPU and GPU params, please pass in device_id argument: {found}"
        )
    if wanted == torch.device("cuda"):
        current = torch.device("cuda", torch.cuda.current_device())
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {group.rank()}, which does not have an explicit "
            f"index. FSDP will use the current device {current}. If this is incorrect, please explicitly call "
            "`torch.cuda.set_device()` before, or pass in the index.",
            stacklevel=3,
        )
        wanted = current
    device = compute_device(wanted, module.parameters(), group)
    for other in on - {host, device}:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {group.rank()}: {other} vs {device}. "
            f"{first_on[other]} is on {other}: call torch.cuda.set_device() and build or move the model there."
        )
    return device


# The module's own unit


def managed_modules(module: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """`module` and what is under it, without wrapped and ignored modules and what is under these; breadth first."""
    seen = {m for inner in instances_in(module) for m in inner.modules()} | ignored.modules
    found = [] if module in seen else [module]
    for parent in found:  # grows meanwhile
        new = [child for child in parent.children() if child not in seen]
        found += new
        seen.update(new)
    return found


def managed_parameters(module: nn.Module, ignored: Ignored) -> ParamPlaces:
    """The parameters that are left for the unit of `module`.

    Raises:
        ValueError: another unit has taken one of them.
    """
    others = set(module.modules()) - set(managed_modules(module, ignored))
    params = {p: places for p, places in find_parameters(module, others).items() if p not in ignored.params}
    for place, *_ in params.values():
        if place.attribute == FLAT_PARAM:
            raise ValueError(
                f"FSDP has been applied to this {type(place.module).__name__} already: use what it returned"
            )
    check_not_taken(params, module)
    return params


@contextmanager
def errors_end_in(text: str) -> Iterator[None]:
    """Errors name parameters from the unit on; this says where that is."""
    try:
        yield
    except ValueError as error:
        error.args = (f"{error} ({text})",)
        raise


def check_alike(instances: list[Any]) -> None:
    """Check the settings that all units of a model must share, when the outermost, the first, begins to run.

    Raises:
        AssertionError: with torch's text: an inner one has been the outermost before.
        ValueError: with torch's text: they do not agree.
    """
    for inner in instances[1:]:
        if inner._is_root:
            raise AssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`: "
                f"the unit {type(inner.module).__name__} ran by itself before the model that holds it."
            )
    alike = ("_use_orig_params", "limit_all_gathers")
    found = {f"value for {name}": {getattr(i, name) for i in instances} for name in alike}
    hybrid = [i._groups.outermost_first for i in instances if i._groups.replicate is not None]
    pairs = {str([process_groups.global_ranks(group) for group in pair]) for pair in hybrid}
    found["pair of process groups for all units with a hybrid strategy"] = pairs
    for what, values in found.items():
        if len(values) > 1:
            raise ValueError(f"Expects one homogeneous {what} but got {values}: give every unit of the model the same")
