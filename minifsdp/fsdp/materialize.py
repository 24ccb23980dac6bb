"""From the user's module to a unit's first values, one unit at a time: meta tensors, devices, rank 0's values.

A model that was built on the `meta` device has shapes and no memory. Its units get their memory one after another, in
the buffer that is then sharded and freed: at no time is more than one of them whole (FSDP paper 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.groups import Groups
from minifsdp.fsdp.unwritten import check_written, mark_unwritten


def has_meta(module: nn.Module, params: ParamPlaces) -> bool:
    """Whether a buffer that is the module's own is on the meta device, or a parameter that is also among `params`."""
    own = (p for p in module._parameters.values() if p in params)
    return any(t is not None and t.is_meta for t in chain(own, module._buffers.values()))


def run_param_init_fn(
    modules: list[nn.Module], params: ParamPlaces, param_init_fn: Callable[[nn.Module], None]
) -> None:
    """Call the user's function on each module, if any of them has meta tensors. It must give them memory and values.

    A parameter with several places, which `Module.to_empty` would give each their own, stays one.

    Args:
        modules: those of one unit.
        params: their parameters.
        param_init_fn: gets a module and initialises what is that module's own.

    Raises:
        ValueError: it is not callable.
        RuntimeError: it leaves something on the meta device; names it.
    """
    if not callable(param_init_fn):
        raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
    if not any(has_meta(module, params) for module in modules):
        return
    for module in modules:
        param_init_fn(module)
    for first, *others in params.values():
        for place in others:
            place.module._parameters[place.attribute] = first.module._parameters[first.attribute]
    left = [place.name for place, *_ in params.values() if getattr(place.module, place.attribute).is_meta]
    left += [
        f"{type(m).__name__}.{name}" for m in modules for name, b in m._buffers.items() if b is not None and b.is_meta
    ]
    if left:
        raise RuntimeError(f"param_init_fn left on the meta device: {', '.join(left)}. They need memory and values.")


Fill = Callable[[list[Tensor], list[nn.Parameter]], Any]
"""Writes parameters' values into views of their memory. Without parameters, buffers get theirs all the same."""


def filler(
    root: nn.Module, modules: list[nn.Module], params: ParamPlaces, device: torch.device, sync: Groups | None
) -> Fill:
    """How a unit of these modules gets its first values.

    Args:
        root: the wrapped module, from which names are counted.
        modules: those whose own parameters and buffers the unit manages.
        params: the parameters that are to be flattened.
        device: where the buffers are to be.
        sync: take rank 0's values over these groups; None: every rank has its own.
    """

    def fill(views: list[Tensor], originals: list[nn.Parameter]) -> None:
        before = [(table, dict(table)) for module in modules for table in (module._parameters, module._buffers)]
        try:
            fill_memory(dict(zip(originals, views, strict=True)))
        except BaseException:
            for table, tensors in before:  # for those who try again: nothing has got its memory yet
                table.update(tensors)  # type: ignore[arg-type]
            raise

    @torch.no_grad()
    def fill_memory(memory: dict[nn.Parameter, Tensor]) -> None:
        to_reset = [module for module in modules if has_meta(module, params)]
        blank_buffers = place_buffers(modules, device)
        if to_reset:
            reset_in(memory, to_reset, params, blank_buffers, sync)
        for p, view in memory.items():
            if not p.is_meta:
                view.copy_(p)
        if sync is not None:
            take_rank_0s(list(memory.values()), modules, sync)
        blank: dict[str, Tensor | None] = {params[p][0].name: view for p, view in memory.items() if p.is_meta}
        if blank_buffers:
            paths = {m: f"{path}." if path else "" for path, m in root.named_modules()}
            blank |= {paths[m] + name: m._buffers[name] for m, name in blank_buffers}
        check_written(blank)

    return fill


# Without memory so far


def place_buffers(modules: Iterable[nn.Module], device: torch.device) -> list[tuple[nn.Module, str]]:
    """Give the modules' own buffers a place on `device`: meta buffers memory, the others a copy there.

    Returns:
        those that have only memory, by their modules and names.
    """
    made: dict[Tensor, Tensor] = {}
    blank = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:  # two modules that share one still do afterwards
                if buffer not in made:
                    made[buffer] = mark_unwritten(torch.empty_like(buffer, device=device))
                module._buffers[name] = made[buffer]
                blank.append((module, name))
            elif buffer.device != device:
                buffer.data = buffer.to(device)
    return blank


def reset_in(
    memory: dict[nn.Parameter, Tensor],
    modules: list[nn.Module],
    params: ParamPlaces,
    blank_buffers: list[tuple[nn.Module, str]],
    sync: Groups | None,
) -> None:
    """Have modules initialise what was on the meta device, in the memory that it will be sharded from.

    What had values keeps them: a module that was built on meta only in part resets all of it.

    Args:
        memory: for each parameter a view in its shape.
        modules: those with meta tensors.
        params: the unit's parameters, each with its places.
        blank_buffers: which buffers have had no values so far.
        sync: over which groups rank 0's values will come, if they do.
    """
    shown = {p: nn.Parameter(mark_unwritten(view), p.requires_grad) for p, view in memory.items()}
    for p, standing_in in shown.items():
        standing_in.__dict__.update(p.__dict__)
        for place in params[p]:
            place.module._parameters[place.attribute] = standing_in
    others: list[tuple[dict[str, Any], str, Tensor]] = [
        (table, name, t)
        for module in modules
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
        if t is not None and not t.is_meta and (module, name) not in blank_buffers
    ]
    reset_as_well = {id(standing_in) for standing_in in shown.values()}
    kept = [(table, name, t, t.clone()) for table, name, t in others if id(t) not in reset_as_well]
    for module in modules:
        if hasattr(module, "reset_parameters") or is_source(sync):  # what comes from rank 0 needs only memory here
            reset(module)
    for table, name, t, values in kept:
        table[name] = t.copy_(values)
    for p, standing_in in shown.items():
        for place in params[p]:
            now = place.module._parameters[place.attribute]
            if now is not None and now.data_ptr() != standing_in.data_ptr():  # reset has made a new one
                memory[p].copy_(now)
            place.module._parameters[place.attribute] = standing_in if p.is_meta else p


def reset(module: nn.Module) -> None:
    """Let a module initialise the parameters and buffers that are its own.

    Raises:
        RuntimeError: it has no `reset_parameters`, or that failed.
    """
    try:
        module.reset_parameters()  # type: ignore[operator]
    except Exception as error:
        raise RuntimeError(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. "
            f"Please ensure that your module of type {type(module)} implements a `reset_parameters()` method, "
            "or pass param_init_fn."
        ) from error


# From rank 0


def is_source(groups: Groups | None) -> bool:
    """Whether this rank's own values count."""
    pair = (groups.shard, groups.replicate) if groups is not None else ()
    return all(group.rank() == 0 for group in pair if group is not None)


def take_rank_0s(views: list[Tensor], modules: list[nn.Module], groups: Groups) -> None:
    """Rank 0's values for every rank: across the groups first, if the model is replicated, then inside each.

    Args:
        views: parameters, each without holes in memory.
        modules: whose own buffers are meant too; one that overlaps itself in memory is replaced by a copy.
        groups: over which ranks.
    """
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.contiguous()
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in (*views, *buffers) if tensor.numel()]
    for group in (groups.replicate, groups.shard):
        if group is not None:
            # as bytes: not every backend knows every dtype
            for handle in [comm.broadcast(tensor.view(torch.uint8), 0, group) for tensor in flat]:
                handle.wait()
