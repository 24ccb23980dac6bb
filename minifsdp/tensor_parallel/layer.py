"""A layer that computes on this rank's part: its parameters are sharded, and code runs around its forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from minifsdp.tensor_parallel.layouts import Layout, Move, are_equal, from_front, move, newly_sharded
from minifsdp.tensor_parallel.parameters import Ranks, called, distribute, local_part, local_parts, placed

Run: TypeAlias = Generator[tuple[Tensor, dict[str, Any]], Tensor, Tensor]
"""Yields the module's input and the attributes it has during its forward, receives its output, returns the layer's."""

_RUNS = "_tensor_parallel_runs"


class LayerStyle(ParallelStyle):
    """How one layer is parallelized; the module's own forward does the computation."""

    @abstractmethod
    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """The layout of each parameter, by name.

        Raises:
            ValueError, TypeError: the style does not fit the module.
        """

    def prepare(self, module: nn.Module) -> None:
        """Prepare a module that the style fits, before its parameters are distributed."""

    @abstractmethod
    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        """One forward: the code before the module's own forward, `yield`, and the code after it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = self._checked_layouts(module)
        self.prepare(module)
        for name, layout in layouts.items():
            p = module.get_parameter(name)
            module.register_parameter(name, distribute(p, device_mesh, layout, self.src_data_rank))

        ranks = Ranks.of(device_mesh, module)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _check_call(module, layouts, args, kwargs)
            name = None if args else next(iter(kwargs))  # the first argument, if it was passed by name
            run = self.run(module, kwargs[name] if name else args[0], ranks)
            x = _begin(module, run)
            return (args, {**kwargs, name: x}) if name else ((x, *args[1:]), kwargs)

        module.__dict__[_RUNS] = []
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)
        return module

    def _checked_layouts(self, module: nn.Module) -> dict[str, Layout]:
        style, what = type(self).__name__, called(module)
        if _RUNS in module.__dict__:
            raise ValueError(f"{style} of {what}, which has a style: give each module one")
        layouts = self.layouts(module)
        inner = [name for name in layouts if "." in name]
        if inner:
            raise ValueError(f"{style} of {what}, which has {inner[0]}: give {style} to its submodules")
        return layouts


def check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """
    Raises:
        ValueError: a subclass of `kind` whose forward would take this rank's part for the whole; or a layer whose
            weight is not a parameter of its own, or is read by another module.
    """
    name = type(module).__name__
    if type(module).forward is not kind.forward:
        raise ValueError(
            f"{name} is an nn.{kind.__name__} with its own forward, to which a rank's part would look like the whole "
            "layer: give it a style of torch.distributed.tensor.parallel, which follows each operator"
        )
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ValueError(f"{name}: nn.MultiheadAttention reads its weight without a call; use Linear layers instead")
    if computed := dict(module.named_parameters()).keys() - {"weight", "bias"}:
        raise ValueError(f"{name} computes its weight from {min(computed)}: remove weight_norm or spectral_norm first")


def _check_call(module: nn.Module, layouts: dict[str, Layout], args: Any, kwargs: Any) -> None:
    kind = type(module).__name__
    if not (args or kwargs):
        raise TypeError(f"{kind} was called without an input: its style is about the first one")
    for name in layouts:
        if name not in module._parameters:  # torch's DDP makes attributes of DTensors
            raise TypeError(f"{name} of a parallel {kind} is no parameter any more: wrap models by minifsdp's DDP")


def _begin(module: nn.Module, run: Run) -> Tensor:
    """The first half of a run; from here on the module's attributes are replaced."""
    x, meanwhile = next(run)
    state = module.__dict__
    state[_RUNS].append((run, {name: state[name] for name in meanwhile}))
    state.update(meanwhile)
    return x


def _end(module: nn.Module, args: Any, output: Any) -> Any:
    """The second half; it restores the module's attributes, also after an error."""
    if not module.__dict__[_RUNS]:  # the first half has raised
        return None
    run, before = module.__dict__[_RUNS].pop()
    module.__dict__.update(before)
    if output is None:  # the forward in between has raised
        return run.close()
    try:
        run.send(output)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"a run on {type(module).__name__} yields more than once")


def local_parameters(
    module: nn.Module, gradient: Layout | None = None, moves: Mapping[str, Move] | None = None
) -> dict[str, Any]:
    """This rank's parts of the module's parameters.

    Args:
        gradient: the layout of all their gradients; None: each gradient has the layout of its parameter.
        moves: of parts, by name; None: none.

    Raises:
        TypeError: a parameter has been replaced by a plain tensor, whose layout is unknown.
    """
    parameters: dict[str, Any] = module._parameters
    there = {name: p for name, p in parameters.items() if p is not None}
    for name, p in there.items():
        if not isinstance(p, DTensor):
            kind = type(module).__name__
            raise TypeError(f"{name} of a parallel {kind} is a plain tensor: make it a DTensor by distribute_tensor")
    parts = local_parts(list(there.values()), gradient, None if moves is None else [moves.get(name) for name in there])
    return {**parameters, **dict(zip(there, parts, strict=True))}


def arrived(x: Tensor, layout: Layout, wanted: Layout, ranks: Ranks, gradient: Layout | None = None) -> Tensor:
    """This rank's part of an input, in the layout `wanted`.

    Args:
        x: a DTensor, or a plain tensor, which is this rank's part.
        layout: the layout of a plain tensor, whose parts are equal.
        gradient: the layout of the gradient; None: `wanted`. The gradient of a DTensor keeps this layout unless the
            input is moved, because autograd first sums the gradients of all its users.

    Raises:
        TypeError, ValueError: the input is not a tensor, or it is a DTensor on other ranks.
    """
    if not isinstance(x, DTensor):
        if not isinstance(x, Tensor):
            raise TypeError(f"the first input of a parallel layer is a {type(x).__name__}: pass a tensor")
        return move(x, layout, wanted, ranks.group, gradient, label=ranks.label)
    found, wanted = ranks.layout_of(x), from_front(wanted, x.ndim)
    if are_equal(found, wanted):
        return local_part(x, gradient)
    size = x.shape[found.dim] if found.is_shard() else None
    return move(local_part(x), found, wanted, ranks.group, gradient, size, ranks.label)


def left(
    y: Tensor, source: Layout, target: Layout, ranks: Ranks, local: bool, shape: torch.Size | None = None
) -> Tensor:
    """An output, moved from layout `source` to `target`: this rank's part if `local`, otherwise a DTensor.

    Args:
        shape: of the whole tensor; None: that of `y`.

    Raises:
        TypeError: the output is not a tensor.
        ValueError: with `local`, the parts of the batch or the sequence would differ in length. A plain tensor has only
            the length of its own part, so a later gather would fail on some ranks and hang on others.
    """
    if not isinstance(y, Tensor):
        raise TypeError(f"a parallel layer returns a {type(y).__name__}: this style is for those that return a tensor")
    shape = y.shape if shape is None else shape
    if not local:
        return placed(y, source, target, ranks, shape)
    cut = newly_sharded(source, target, y.ndim)
    if cut is not None and cut < y.ndim - 1 and shape[cut] % ranks.group.size():
        raise ValueError(
            f"dimension {cut} of {list(shape)} has no equal parts on {ranks.group.size()} ranks: pad it, or set "
            "use_local_output=False"
        )
    size = shape[source.dim] if source.is_shard() else None
    return move(y, source, target, ranks.group, size=size, label=ranks.label)
