"""Reference answers of lab 04, the flat parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.layout import Layout


@reference(
    "4.1",
    hints=(
        "`-numel % ranks` elements are missing to the next multiple of `ranks`: none if `ranks` divides `numel`.",
        "`flat.new_zeros(numel + padding)`, copy `flat` into its beginning, and `chunk(ranks)` the whole.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def pad_and_chunk(flat: Tensor, ranks: int) -> list[Tensor]:
    """Cut `flat` [numel] into one equal shard per rank, padded with zeros at the end."""
    padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
    padded[: flat.numel()] = flat
    return list(padded.chunk(ranks))


@reference(
    "4.2",
    hints=(
        "`torch.split(full, [*sizes, padding])` cuts the buffer into one view per parameter and one of the padding; "
        "`.view(p.shape)` gives each its shape.",
        "Per parameter, in this order: `view.copy_(p.data)`, then `p.data = view`, which lets go of the old memory. "
        "What `device.empty` hands out holds garbage: the padding needs its own `zero_()`.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def flatten_parameters(params: list[nn.Parameter], ranks: int) -> Tensor:
    """Move parameters into one buffer whose size `ranks` divides, and make each a view of it."""
    sizes = [p.numel() for p in params]
    padding = -sum(sizes) % ranks
    full = device.empty(sum(sizes) + padding, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, padding])
    for p, part in zip(params, parts, strict=True):
        view = part.view(p.shape)
        view.copy_(p.data)
        p.data = view
    rest.zero_()
    return full


@reference(
    "4.3",
    hints=(
        "In the flat parameter the shard is `[rank * length, (rank + 1) * length)` with `length` the padded shard's; "
        "where does parameter `index` begin and end there?",
        "Subtract the shard's start from both ends of the parameter, then clamp both into `[0, length]`: "
        "what does not overlap becomes empty by itself.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def shard_bounds(sizes: list[int], index: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements `[low, high)` of rank `rank`'s shard that belong to parameter `index`; `low == high` if none do."""
    length = -(-sum(sizes) // ranks)
    begin = sum(sizes[:index]) - rank * length
    end = begin + sizes[index]
    return min(max(begin, 0), length), min(max(end, 0), length)


@reference(
    "4.4",
    hints=(
        "Walk `module.named_modules()` and each child's `child._parameters.items()`: there a tied parameter appears "
        "at every place. A dict keyed by the Parameter itself (it hashes by identity) collects its places.",
        "`places.setdefault(p, []).append((child, attribute, name))`; `flatten(list(places))` once; then everywhere "
        "`del child._parameters[attribute]` and `setattr(child, attribute, view)`.",
    ),
    forbids=(FlatParameter.__init__, find_parameters),
)
def place_views(module: nn.Module, flatten: Callable[[list[nn.Parameter]], list[Tensor]]) -> list[list[str]]:
    """Replace every parameter of `module` by a view, in each place that uses it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for prefix, child in module.named_modules():
        for attribute, p in child._parameters.items():
            if p is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(p, []).append((child, attribute, name))
    for view, users in zip(flatten(list(places)), places.values(), strict=True):
        for child, attribute, _ in users:
            del child._parameters[attribute]
            setattr(child, attribute, view)
    return [[name for _, _, name in users] for users in places.values()]


@reference(
    "4.5",
    hints=(
        "Each module belongs to one unit: `{child: number for number, unit in enumerate(inner, 1) for child in "
        "unit.modules()}`, and what is not in there to the root, 0. A parameter's unit is that of the module it is in.",
        "`model.named_parameters(remove_duplicate=False)` shows a tied parameter at each place, and "
        '`model.get_submodule(name.rpartition(".")[0])` is the module there. Remember for each parameter the unit '
        "and the name of its first place; at a further place the unit must be the same.",
    ),
    forbids=(FlatParameter.__init__, find_parameters),
)
def assign_units(model: nn.Module, inner: list[nn.Module], ranks: int) -> list[dict[str, int]]:
    """The layout of each unit's flat parameter, the root's first: elements by parameter, and last the padding."""
    unit_of = {child: number for number, unit in enumerate(inner, start=1) for child in unit.modules()}
    units: list[dict[str, int]] = [{} for _ in range(1 + len(inner))]
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), 0)
        if p not in first:
            first[p] = unit, name
            units[unit][name] = p.numel()
        elif first[p][0] != unit:
            raise ValueError(f"{first[p][1]} and {name} are one parameter, but they would be in two units")
    for layout in units:
        layout["padding"] = -sum(layout.values()) % ranks
    return units
