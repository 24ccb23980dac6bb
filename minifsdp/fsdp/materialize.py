"""From the user's module to a unit's first values, one unit at a time: meta tensors, devices, rank 0's values.

A model that was built on the `meta` device has shapes and no memory. Its units get their memory one after another, in
the buffer that is then sharded and freed: at no time is more than one of them whole (FSDP paper 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.flat_param import ParamPlaces, copy_values
from minifsdp.fsdp.groups import Groups


def run_param_init_fn(modules: Iterable[nn.Module], param_init_fn: Callable[[nn.Module], None]) -> None:
    """Call the user's function on each module, if any of them has meta tensors. It must give them memory and values.

    Raises:
        ValueError: it is not callable.
    """
    if not callable(param_init_fn):
        raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
    modules = list(modules)
    if any(has_meta(module) for module in modules):
        for module in modules:
            param_init_fn(module)


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer that is the module's own is on the meta device."""
    return any(t is not None and t.is_meta for t in chain(module._parameters.values(), module._buffers.values()))


@torch.no_grad()
def materialize_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give the modules' own buffers a place on `device`: meta buffers memory, the others a copy there."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def filler(
    modules: list[nn.Module], params: ParamPlaces, device: torch.device, sync: Groups | None
) -> Callable[[list[Tensor], list[nn.Parameter]], None]:
    """How a unit of these modules gets its first values.

    Args:
        modules: those whose own parameters and buffers the unit manages.
        params: the parameters that are to be flattened.
        device: where the buffers are to be.
        sync: take rank 0's values over these groups; None: every rank has its own.
    """

    def fill(views: list[Tensor], originals: list[nn.Parameter]) -> None:
        to_reset = [module for module in modules if has_meta(module)]
        materialize_buffers(modules, device)
        real = [(view, p) for view, p in zip(views, originals, strict=True) if not p.is_meta]
        copy_values([view for view, _ in real], [p for _, p in real])
        if to_reset:
            for view, p in zip(views, originals, strict=True):
                for place in params[p]:
                    place.module._parameters[place.attribute] = nn.Parameter(view, p.requires_grad)
            for module in to_reset:
                reset(module)
        if sync is not None:
            take_rank_0s([*views, *(b for module in modules for b in module._buffers.values() if b is not None)], sync)

    return fill


def reset(module: nn.Module) -> None:
    """Let a module initialise the parameters and buffers that are its own.

    Raises:
        RuntimeError: it has no `reset_parameters`.
    """
    try:
        module.reset_parameters()  # type: ignore[operator]
    except BaseException as error:
        raise RuntimeError(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. "
            f"Please ensure that your module of type {type(module)} implements a `reset_parameters()` method, "
            "or pass param_init_fn."
        ) from error


def take_rank_0s(tensors: list[Tensor], groups: Groups) -> None:
    """Rank 0's values for every rank: across the groups first, if the model is replicated, then inside each."""
    for group in (groups.replicate, groups.shard):
        if group is not None:
            for tensor in tensors:
                comm.broadcast(tensor.detach(), 0, group).wait()
