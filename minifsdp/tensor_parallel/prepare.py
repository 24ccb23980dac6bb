"""Inputs of a module, moved to other layouts (torch/distributed/tensor/parallel/style.py).

A DTensor carries its layout; the layout of a plain tensor is an argument of the style.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from minifsdp.tensor_parallel.layer import left
from minifsdp.tensor_parallel.layouts import Layout, check_layouts, from_front
from minifsdp.tensor_parallel.parameters import Ranks, local_part

Layouts: TypeAlias = Layout | tuple[Layout | None, ...] | None


@dataclass(kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Moves a module's inputs.

    Attributes:
        input_layouts: the layouts of plain positional inputs; None instead of a layout leaves an input unchanged.
        desired_input_layouts: the layouts in which the module receives them, the same number.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword inputs, by name.
        use_local_output: pass this rank's parts on as plain tensors, instead of DTensors.

    Raises:
        ValueError: the numbers of given and desired layouts differ; or, in forward, those of layouts and inputs.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: dict[str, Layout] | None = None
    desired_input_kwarg_layouts: dict[str, Layout] | None = None
    use_local_output: bool = False

    def __post_init__(self) -> None:
        self.input_layouts, self.desired_input_layouts = (
            several(self.input_layouts),
            several(self.desired_input_layouts),
        )
        if self.input_layouts is not None:
            check_lengths("input_layouts", self.input_layouts, "desired_input_layouts", self.desired_input_layouts)
        given, desired = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if given.keys() != desired.keys():
            names = sorted(given.keys() ^ desired.keys())
            raise ValueError(f"input_kwarg_layouts and desired_input_kwarg_layouts differ in {names}: give both")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_names(module, self.input_kwarg_layouts or {})
        ranks = Ranks.of(device_mesh, module)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.input_layouts is not None:
                given, desired = self.input_layouts, self.desired_input_layouts
                args = moved(args, given, desired, ranks, self.use_local_output, "input")
            return args, {**kwargs, **self._moved_by_name(kwargs, ranks)}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _moved_by_name(self, kwargs: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        given, desired = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        return {
            name: _laid(kwargs[name], layout, desired[name], ranks, self.use_local_output)
            for name, layout in given.items()
            if name in kwargs
        }


def _check_names(module: nn.Module, names: Iterable[str]) -> None:
    """
    Raises:
        ValueError: the module's forward has no such argument.
    """
    arguments = inspect.signature(module.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values())
    if missing := [name for name in names if name not in arguments and not takes_any]:
        raise ValueError(f"{type(module).__name__} has no argument {missing[0]!r}: correct input_kwarg_layouts")


def several(layouts: Layouts) -> Any:
    """A tuple of layouts, also from one; None: none."""
    several = layouts if layouts is None or isinstance(layouts, tuple | list) else (layouts,)
    check_layouts(**{f"layout {number}": each for number, each in enumerate(several or ()) if each is not None})
    return several


def check_lengths(name: str, these: Any, other: str, those: Any) -> None:
    """
    Raises:
        ValueError: there are not as many of these as of those.
    """
    if those is None or len(these) != len(those):
        raise ValueError(f"{name} has {len(these)} layouts and {other} {len(those or ())}: give as many")


def moved(tensors: tuple[Any, ...], given: Any, desired: Any, ranks: Ranks, local: bool, what: str) -> Any:
    """Tensors from their given to their desired layouts.

    Raises:
        ValueError: there are not as many layouts as tensors.
    """
    if len(tensors) != len(given):
        raise ValueError(f"the module has {len(tensors)} {what}s and {what}_layouts {len(given)}: give one for each")
    return tuple(_laid(*each, ranks, local) for each in zip(tensors, given, desired, strict=True))


def _laid(x: Any, given: Layout | None, desired: Layout | None, ranks: Ranks, local: bool) -> Any:
    """`x` in the desired layout, as this rank's part or as a DTensor; `x` itself if no layout is given."""
    if given is None:
        return x
    if not isinstance(x, Tensor):
        raise ValueError(f"a layout is given for {x!r}, which is not a tensor: give None instead")
    shape = x.shape
    if isinstance(x, DTensor):
        given, x = ranks.layout_of(x), local_part(x)
    elif (given := from_front(given, x.ndim)).is_shard():
        shape = torch.Size(n * (ranks.group.size() if dim == given.dim else 1) for dim, n in enumerate(shape))
    return left(x, given, given if desired is None else desired, ranks, local, shape)
