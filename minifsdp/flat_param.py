"""The flat parameter: many parameters as views of one padded buffer, and a shard of it (FSDP, arXiv 2304.11277, 3.2.1).

    full      [ w1 ........ | b1 . | w2 .......... | pad ]    numel + padding, a multiple of N
    shard r   [ ............ ]                                every rank an equal piece, wherever that cuts

Collectives want one large message and even shards. The buffer gives both: an all-gather writes `full` from the
shards, a reduce-scatter reads a buffer of the same layout, and nothing is copied in between, since the parameters are
views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifsdp import device


class Place(NamedTuple):
    """One use of a parameter: an attribute of a module, and its qualified name for messages and state dicts."""

    module: nn.Module
    attribute: str
    name: str


ParamPlaces = dict[nn.Parameter, list[Place]]
"""Each parameter once, with every place that uses it: more than one if it is tied."""


def find_parameters(module: nn.Module, skip: Iterable[nn.Module] = ()) -> ParamPlaces:
    """The parameters of `module` and its children in their order, those under the modules in `skip` left out."""
    skipped = {child for root in skip for child in root.modules()}
    found: ParamPlaces = {}
    for prefix, child in module.named_modules():
        if child not in skipped:
            for attribute, p in child._parameters.items():
                if p is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    found.setdefault(p, []).append(Place(child, attribute, name))
    return found


def copy_values(views: list[Tensor], originals: list[nn.Parameter]) -> None:
    """Copy the original parameters' values: the default first values of a flat parameter."""
    for view, p in zip(views, originals, strict=True):
        view.copy_(p)


class FlatParameter:
    """Flattens parameters into one buffer and keeps a shard of it.

    Attributes:
        places: who uses each parameter, one list per parameter; a tied parameter is flattened once.
        shapes: the parameters' shapes.
        sizes: their numbers of elements, and last the padding's.
        numel: elements without padding.
        padding: elements added so that `ranks` divides the whole; fewer than `ranks`.
        full: the buffer [numel + padding], freed at first; `device.allocate` gives it memory, a gather its values.
        views: the parameters, each in its shape, as views of `full`.
        shard: what the optimizer sees, a Parameter [(numel + padding) / ranks] that owns its memory.
        rank, ranks: whose shard it is, and of how many.

    Args:
        params: what to flatten: floating point, all of one dtype, one device and one `requires_grad`.
        rank: whose shard to keep.
        ranks: how many shards there are, N.
        fill: writes the parameters' values into their views of `full`, from which the shard is then taken.
        to: device of the buffer; default: where the parameters are, which is then one device.

    Raises:
        ValueError: there is nothing to flatten, or the parameters are of two kinds; names one of each.
    """

    uniform_requires_grad = True

    def __init__(
        self,
        params: ParamPlaces,
        rank: int,
        ranks: int,
        fill: Callable[[list[Tensor], list[nn.Parameter]], None] = copy_values,
        to: torch.device | None = None,
    ) -> None:
        _check_uniform(params, self.uniform_requires_grad, same_device=to is None)
        originals, first = list(params), next(iter(params))
        self.rank, self.ranks = rank, ranks
        self.places = list(params.values())
        self.shapes = [p.shape for p in originals]
        self._lay_out(originals)
        self.full = device.empty(self.numel + self.padding, first.dtype, "unsharded", to or first.device)
        self.views = self.unflatten(self.full)
        with torch.no_grad():
            fill(self.views, originals)
            self.clear_padding(self.full)
        self.shard = nn.Parameter(self.full.chunk(ranks)[rank].clone(), requires_grad=first.requires_grad)
        device.free(self.full)

    def _lay_out(self, originals: list[nn.Parameter]) -> None:
        self.numel = sum(p.numel() for p in originals)
        self.padding = -self.numel % self.ranks
        self.sizes = [*(p.numel() for p in originals), self.padding]

    @property
    def names(self) -> list[str]:
        """The parameters' qualified names, a tied one's first."""
        return [places[0].name for places in self.places]

    def unflatten(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer [numel + padding] of this layout, one per parameter and in its shape.

        By `split`, not by slices: its views share one base, and autograd and storage accounting see them as such.
        """
        return [self.shaped(index, part) for index, part in enumerate(torch.split(buffer, self.sizes)[:-1])]

    def shaped(self, index: int, values: Tensor) -> Tensor:
        """A view of parameter `index` in its shape, of its values as they lie in the buffer, 1-D."""
        return values.view(self.shapes[index])

    def flattened(self, index: int, values: Tensor) -> Tensor:
        """The opposite: values of parameter `index` as they lie in the buffer, 1-D."""
        return values.reshape(-1)

    def mine(self, buffer: Tensor) -> Tensor:
        """This rank's part [(numel + padding) / ranks] of a buffer of this layout."""
        size = self.shard.numel()
        return buffer[self.rank * size :][:size]

    def padding_of(self, buffer: Tensor) -> Tensor:
        """The padding [padding] at the end of a buffer of this layout."""
        return buffer[self.numel :]

    def clear_padding(self, buffer: Tensor) -> None:
        """Zero what belongs to no parameter in a buffer of this layout."""
        if self.padding:
            self.padding_of(buffer).zero_()

    def shard_bounds(self, index: int, rank: int) -> tuple[int, int]:
        """The elements `[low, high)` of rank `rank`'s shard that are parameter `index`'s; `low == high` if none are."""
        start, length = rank * self.shard.numel(), self.shard.numel()
        offset = sum(self.sizes[:index])
        low, high = (min(max(edge - start, 0), length) for edge in (offset, offset + self.sizes[index]))
        return low, high

    def part_of(self, index: int, values: Tensor) -> Tensor:
        """This rank's part, 1-D, of the whole `values` of parameter `index`."""
        low, high = self.shard_bounds(index, self.rank)
        before = [self.shard_bounds(index, rank) for rank in range(self.rank)]
        start = sum(there - here for here, there in before)
        return self.flattened(index, values)[start : start + high - low]


def _check_uniform(params: ParamPlaces, requires_grad: bool, same_device: bool) -> None:
    if not params:
        raise ValueError("Expects non-empty `params`: there is no parameter to flatten")
    (first, first_places), *others = params.items()
    name = first_places[0].name
    if not first.is_floating_point():
        raise ValueError(f"Cannot flatten integer dtype tensors: {name} is {first.dtype}")
    for p, places in others:
        other = places[0].name
        if p.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and {p.dtype}: {name} is "
                f"{first.dtype}, {other} is {p.dtype}. Cast one, or wrap the module of {other} as a unit of its own."
            )
        if same_device and p.device != first.device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {first.device} and {p.device}: {name} is on "
                f"{first.device}, {other} on {p.device}. Move the module to one device first, or pass device_id."
            )
        if requires_grad and p.requires_grad != first.requires_grad:
            frozen, trained = (other, name) if first.requires_grad else (name, other)
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
                f"{frozen} is frozen, {trained} is not. Wrap the frozen module as a unit of its own, or pass "
                "use_orig_params=True."
            )
