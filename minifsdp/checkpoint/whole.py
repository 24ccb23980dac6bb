"""Whole tensors of a checkpoint as the DTensors of a model: sharded for this rank, in the shapes of the plain model.

Tensor parallelism keeps a fused weight [3 width, width] as [3, width, width], to shard each of the three matrices
(minifsdp/tensor_parallel/columns.py). The elements have the same order: one is a view of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minifsdp import private

Named = Mapping[str, nn.Parameter]


def to_plain(named: Named, model: nn.Module, state: Any) -> Any:
    """Whole tensors of `model`, or of its optimizer, in the shapes of the plain model."""
    shapes = {name: (p.shape, _plain(p)) for name, p in named.items() if p in _stacked(model)}
    return _translated(state, {name: partial(_reshaped, *pair) for name, pair in shapes.items()})


def from_plain(named: Named, model: nn.Module, state: Any) -> Any:
    """Whole tensors of the plain model, or of its optimizer, in the shapes of `model`."""
    shapes = {name: (_plain(p), p.shape) for name, p in named.items() if p in _stacked(model)}
    return _translated(state, {name: partial(_reshaped, *pair) for name, pair in shapes.items()})


def cut(named: Named, state: Any) -> Any:
    """This rank's parts of whole tensors, as DTensors in the layouts of their parameters.

    torch's `distribute_tensor` cannot cut a dimension that data and tensor parallelism share unevenly.
    """
    return _translated(state, {name: partial(_part, p) for name, p in named.items() if isinstance(p, DTensor)})


def _stacked(model: nn.Module) -> set[nn.Parameter]:
    layers = (m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.ndim == 3)
    return {p for layer in layers for p in layer.parameters(recurse=False)}


def _plain(p: Tensor) -> torch.Size:
    return torch.Size([p.shape[0] * p.shape[1], *p.shape[2:]])


def _reshaped(given: torch.Size, wanted: torch.Size, t: Tensor) -> Tensor:
    return t.reshape(wanted) if t.shape == given else t


def _part(p: Any, t: Tensor) -> Tensor:
    if t.shape != p.shape:
        return t
    shape, offset = private.place_of(p)
    place = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local = t.detach()[place].to(p.device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _translated(state: Any, by_name: Mapping[str, Callable[[Tensor], Tensor]], path: str = "") -> Any:
    """The state, with a parameter's tensors translated: those whose path holds its name."""
    if isinstance(state, dict):
        return {key: _translated(value, by_name, f"{path}.{key}") for key, value in state.items()}
    if not isinstance(state, Tensor) or isinstance(state, DTensor) or not state.ndim:
        return state
    parts = path.split(".")
    places = ((begin, end) for begin in range(len(parts)) for end in range(len(parts), begin, -1))
    names = (".".join(parts[begin:end]) for begin, end in places)
    translate = next((by_name[name] for name in names if name in by_name), None)
    return state if translate is None else translate(state)
