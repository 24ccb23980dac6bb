"""A layer that computes on this rank's parts: its parameters are cut, and something surrounds its forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from minifsdp.tensor_parallel.layouts import Layout, from_front, layout_of, move
from minifsdp.tensor_parallel.parameters import Ranks, distribute, local_part, local_parts, placed

Run: TypeAlias = Generator[tuple[Tensor, dict[str, Any]], Tensor, Tensor]
"""Yields the module's input and its attributes meanwhile; is sent the module's output, returns the layer's."""

_RUNS = "_tensor_parallel_runs"


class LayerStyle(ParallelStyle):
    """What to do to one layer; the module's own forward computes."""

    @abstractmethod
    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """How each parameter is to lie, by its name.

        Raises:
            ValueError, TypeError: the style does not fit the module.
        """

    @abstractmethod
    def run(self, module: nn.Module, x: Tensor, ranks: Ranks) -> Run:
        """One forward: what comes before the module's own, `yield`, what follows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, layout in self.layouts(module).items():
            p = module.get_parameter(name)
            module.register_parameter(name, distribute(p, device_mesh, layout, self.src_data_rank))

        ranks = Ranks.of(device_mesh, module)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else next(iter(kwargs))  # its first argument, if that was given by name
            run = self.run(module, kwargs[name] if name else args[0], ranks)
            x = _begin(module, run)
            return (args, {**kwargs, name: x}) if name else ((x, *args[1:]), kwargs)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)
        return module


def _begin(module: nn.Module, run: Run) -> Tensor:
    """The first half of a run; the module has other attributes from then on."""
    x, meanwhile = next(run)
    state = module.__dict__
    state.setdefault(_RUNS, []).append((run, {name: state[name] for name in meanwhile}))
    state.update(meanwhile)
    return x


def _end(module: nn.Module, args: Any, output: Any) -> Any:
    """The second half: the module is itself again, even after an error."""
    if not module.__dict__.get(_RUNS):  # the first half has raised
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


def local_parameters(module: nn.Module, gradient: Layout | None = None) -> dict[str, Any]:
    """This rank's parts of the module's parameters, whose gradients all lie as `gradient`; None: as the parameters."""
    names = [name for name, p in module._parameters.items() if p is not None]
    parts = local_parts([module._parameters[name] for name in names], gradient)
    return {**module._parameters, **dict(zip(names, parts, strict=True))}


def arrived(x: Tensor, layout: Layout, wanted: Layout, ranks: Ranks, gradient: Layout | None = None) -> Tensor:
    """This rank's part, as `wanted`, of an input that is a DTensor, or a plain tensor that lies as `layout`.

    Args:
        gradient: the layout of its gradient; None: as `wanted`. That of a DTensor is not moved if it need not be: the
            gradients of all its users are summed first.
    """
    if not isinstance(x, DTensor):
        return move(x, layout, wanted, ranks.group, gradient, label=ranks.label)
    found, wanted = layout_of(x), from_front(wanted, x.ndim)
    if found == wanted:
        return local_part(x, gradient)
    size = x.shape[found.dim] if found.is_shard() else None
    return move(local_part(x), found, wanted, ranks.group, gradient, size, ranks.label)


def left(
    y: Tensor, source: Layout, target: Layout, ranks: Ranks, local: bool, shape: torch.Size | None = None
) -> Tensor:
    """An output that lies as `source`, moved to `target`: this rank's part if `local`, otherwise a DTensor.

    Args:
        shape: of the whole; None: as that of `y`.
    """
    shape = y.shape if shape is None else shape
    if not local:
        return placed(y, source, target, ranks, shape)
    source = from_front(source, y.ndim)
    size = shape[source.dim] if source.is_shard() else None
    return move(y, source, target, ranks.group, size=size, label=ranks.label)
