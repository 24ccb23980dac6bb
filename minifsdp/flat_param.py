"""The flat parameter: many parameters as views of one padded buffer, and a shard of it (FSDP, arXiv 2304.11277, 3.2.1).

    full      [ w1 ........ | b1 . | w2 .......... | pad ]    numel + padding, a multiple of N
    shard r   [ ............ ]                                every rank has an equal piece (layout.py)

Collectives need even shards, and large messages to be efficient. The buffer provides both: an all-gather writes `full`
from the shards, and a reduce-scatter reads a buffer of the same layout. Nothing is copied in between, because the
parameters are views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minifsdp import device
from minifsdp.layout import Layout
from minifsdp.whole_tensors import is_flat


class Place(NamedTuple):
    """One use of a parameter: an attribute of a module, and its qualified name for messages and state dicts."""

    module: nn.Module
    attribute: str
    name: str


ParamPlaces = dict[nn.Parameter, list[Place]]
"""Each parameter once, with every place that uses it: more than one if it is tied."""


def find_parameters(module: nn.Module, skip: Iterable[nn.Module] = ()) -> ParamPlaces:
    """The parameters of `module` and its children in their order, except those under the modules in `skip`."""
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
        layout: the positions of the parameters in the buffer, and of its division into shards.
        places: the uses of each parameter, one list per parameter; a tied parameter is flattened once.
        full: the buffer [numel + padding], freed at first; `device.allocate` gives it memory, a gather its values.
        views: the parameters, each in its shape, as views of `full`.
        shard: the tensor that the optimizer updates, a Parameter [(numel + padding) / ranks] with its own memory.
        rank: the rank that holds the shard.

    Args:
        params: the parameters to flatten: floating point, all of one dtype, one device and one `requires_grad`.
        rank: the rank whose shard to keep.
        ranks: number of shards, N.
        fill: writes the parameters' values into their views of `full`, from which the shard is then taken.
        to: device of the buffer; default: the device of the parameters, which must then be the same for all.
        lay_out: computes the layout of the parameters for N ranks.
        same_requires_grad: False if the parameters may differ in `requires_grad`.

    Raises:
        ValueError: there is nothing to flatten, or the parameters are of two kinds; the error names one of each.
    """

    def __init__(
        self,
        params: ParamPlaces,
        rank: int,
        ranks: int,
        fill: Callable[[list[Tensor], list[nn.Parameter]], None] = copy_values,
        to: torch.device | None = None,
        lay_out: Callable[[Iterable[Tensor], int], Layout] = Layout.of,
        same_requires_grad: bool = True,
    ) -> None:
        _check_uniform(params, same_requires_grad, same_device=to is None)
        originals, first = list(params), next(iter(params))
        self.rank, self.layout = rank, lay_out(originals, ranks)
        self.places = list(params.values())
        self.full = device.empty(self.layout.padded, first.dtype, "unsharded", to or first.device)
        self.views = self.unflatten(self.full)
        with torch.no_grad():
            fill(self.views, originals)
            self.layout.clear_gaps(self.full)
        self.shard = nn.Parameter(self.mine(self.full).clone(), requires_grad=first.requires_grad)
        device.free(self.full)

    @property
    def names(self) -> list[str]:
        """The parameters' qualified names, a tied one's first."""
        return [places[0].name for places in self.places]

    @property
    def numel(self) -> int:
        """Number of elements without the padding."""
        return self.layout.numel

    @property
    def padding(self) -> int:
        """Number of elements added so that `ranks` divides the whole; fewer than `ranks`."""
        return self.layout.padding

    def unflatten(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer [numel + padding] of this layout, one per parameter and in its shape."""
        return self.layout.views(buffer)

    def padding_of(self, buffer: Tensor) -> Tensor:
        """The padding [padding] at the end of a buffer of this layout."""
        return buffer[self.numel :]

    def mine(self, buffer: Tensor) -> Tensor:
        """This rank's part [(numel + padding) / ranks] of a buffer of this layout."""
        return self.layout.shard(buffer, self.rank)


def _check_uniform(params: ParamPlaces, requires_grad: bool, same_device: bool) -> None:
    if not params:
        raise ValueError("Expects non-empty `params`: there is no parameter to flatten")
    (first, first_places), *others = params.items()
    name = first_places[0].name
    if found := [places[0].name for p, places in params.items() if isinstance(p, DTensor) or is_flat(p)]:
        raise ValueError(f"{found[0]} is sharded already, so it cannot be flattened: fully_shard can shard it further")
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
