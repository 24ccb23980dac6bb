"""A unit's first values, from the user's module, one unit at a time: meta tensors, devices, rank 0's values.

A model that was built on the `meta` device has shapes but no memory. Its units get their memory one after another, in
the buffer that is then sharded and freed, so that at most one unit is whole at any time (FSDP paper 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.flat_param import ParamPlaces
from minifsdp.following import marking
from minifsdp.fsdp.torch_api.groups import Groups
from minifsdp.unwritten import check_written, mark_unwritten


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The modules' own parameters and buffers, not their children's: each with its table and its name there."""
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from [(table, name, t) for name, t in table.items() if t is not None]


def own_buffers(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    return [(module, name, b) for module in modules for name, b in module._buffers.items() if b is not None]


def has_meta(module: nn.Module, params: ParamPlaces) -> bool:
    """True if one of the module's own buffers, or of its own parameters in `params`, is on the meta device."""
    return any(t.is_meta and (table is module._buffers or t in params) for table, _, t in own_tensors([module]))


def run_param_init_fn(modules: list[nn.Module], params: ParamPlaces, param_init_fn: Callable[..., None]) -> None:
    """Call the user's function on each module, if any of them has meta tensors. It must give them memory and values.

    Children first, as `Module.apply` does: a module may set what is in its children. It cannot take their memory from
    them, with a `to_empty` that goes on into them. A parameter with several places, which `to_empty` would give each
    their own, stays one.

    Args:
        modules: those of one unit, the outermost first.
        params: their parameters.
        param_init_fn: gets a module and initializes what is that module's own.

    Raises:
        ValueError: it is not callable.
        RuntimeError: it leaves something on the meta device; names it.
    """
    if not callable(param_init_fn):
        raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
    if not any(has_meta(module, params) for module in modules):
        return
    todo = set(modules)
    for module in children_first(modules[0], todo):
        inside = own_tensors(set(module.modules()) - todo - {module})
        before = [(table, name, t, t.data) for table, name, t in inside if not t.is_meta]
        with marking(module):
            param_init_fn(module)
        for table, name, t, memory in before:
            t.data = memory
            table[name] = t
    for first, *others in params.values():
        for place in others:
            place.module._parameters[place.attribute] = first.module._parameters[first.attribute]
    left = [place.name for place, *_ in params.values() if getattr(place.module, place.attribute).is_meta]
    left += [f"{type(module).__name__}.{name}" for module, name, b in own_buffers(modules) if b.is_meta]
    if left:
        raise RuntimeError(f"param_init_fn left on the meta device: {', '.join(left)}. They need memory and values.")


def children_first(module: nn.Module, todo: set[nn.Module]) -> Iterator[nn.Module]:
    """`module` after what is under it, as far as it is in `todo`, which loses what comes."""
    todo.remove(module)
    for child in module.children():
        if child in todo:
            yield from children_first(child, todo)
    yield module


Fill = Callable[[list[Tensor], list[nn.Parameter]], Any]
"""Writes parameters' values into views of their memory. Without parameters, buffers get theirs all the same."""


def filler(
    root: nn.Module, modules: list[nn.Module], params: ParamPlaces, device: torch.device, sync: Groups | None
) -> Fill:
    """The function that gives a unit of these modules its first values.

    Args:
        root: the wrapped module, from which names are counted.
        modules: those whose own parameters and buffers the unit manages.
        params: the parameters that are to be flattened.
        device: where the buffers are to be.
        sync: take rank 0's values over these groups; None: every rank has its own.
    """

    def fill(views: list[Tensor], originals: list[nn.Parameter]) -> None:
        before = list(own_tensors(modules))
        try:
            fill_memory(dict(zip(originals, views, strict=True)))
        except BaseException:
            for table, name, t in before:  # for those who try again: nothing has got its memory yet
                table[name] = t
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
        check_written(
            blank,
            "have each module's reset_parameters() write all parameters and buffers of its own, or pass param_init_fn.",
        )

    return fill


# Without memory so far


def place_buffers(modules: Iterable[nn.Module], device: torch.device) -> list[tuple[nn.Module, str]]:
    """Give the modules' own buffers a place on `device`: meta buffers memory, the others a copy there.

    Returns:
        those that have only memory, by their modules and names.
    """
    made: dict[Tensor, Tensor] = {}
    blank = []
    for module, name, buffer in own_buffers(modules):
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
    """Have modules initialize what was on the meta device, in the memory that it will be sharded from.

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
    blank = {id(t) for t in (*shown.values(), *(module._buffers[name] for module, name in blank_buffers))}
    own = own_tensors(modules)
    kept = [(table, name, t, t.clone()) for table, name, t in own if not (t.is_meta or id(t) in blank)]
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
    """Let a module initialize the parameters and buffers that are its own.

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
    """True if this rank's own values count."""
    return groups is None or all(group.rank() == 0 for group in groups.outermost_first)


def take_rank_0s(views: list[Tensor], modules: list[nn.Module], groups: Groups) -> None:
    """Rank 0's values for every rank: across the groups first, if the model is replicated, then inside each.

    Args:
        views: parameters, each without holes in memory.
        modules: whose own buffers are meant too; one that overlaps itself in memory is replaced by a copy.
        groups: over which ranks.
    """
    for module, name, buffer in own_buffers(modules):
        module._buffers[name] = buffer.contiguous()
    buffers = [buffer for *_, buffer in own_buffers(modules)]
    flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in (*views, *buffers) if tensor.numel()]
    for group in groups.outermost_first:  # as bytes: not every backend knows every dtype
        for handle in [comm.broadcast(tensor.view(torch.uint8), 0, group) for tensor in flat]:
            handle.wait()
